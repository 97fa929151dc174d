"""The engine process

May import:  receiver cache, batching, generation.:renderers and below.
"""
