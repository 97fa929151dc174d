"""Mirrored caches of processed items.

May import: inputs.
"""
