"""Encoded bytes become `MediaRef`s: fetched, identified, with the decode deferred.

In: URLs, bytes, files. Out: `MediaRef`s and, on demand, decoded media. Imports neither torch
nor transformers.
"""
