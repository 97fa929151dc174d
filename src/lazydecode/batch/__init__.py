"""Offline pipelines over the same core.

May import: everything below.
"""
