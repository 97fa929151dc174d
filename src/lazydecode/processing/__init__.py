"""Parsed items and a prompt become token ids, placeholder ranges and tensors.

May import: cache, parse, hasher, media.
"""
