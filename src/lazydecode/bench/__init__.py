"""Benchmarks: what media cost here, beside the physical floor and beside decoding eagerly.

In: settings of a run, a model folder or the URL of a server. Out: one JSON record per run, from
which tables and the page on performance are made. Everything is a ratio within one run on one
machine. May import everything below the command line; nothing imports it but that.
"""
