"""Parsed items and a prompt become token ids, placeholder ranges and tensors.

In: `ProcessorInputs`. Out: `inputs.MultiModalInput`, in two phases with the decodes between.
May import: cache, parse, hasher, media.
"""
