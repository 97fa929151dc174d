"""Model families on Hugging Face processors; generic.py serves those without an entry.

May import: processing.
"""
