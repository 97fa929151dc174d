"""A chat request becomes media requests, a prompt and engine input.

May import: models and below.
"""
