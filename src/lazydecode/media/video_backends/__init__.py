"""Video decoders, one small class each, chosen by name."""
