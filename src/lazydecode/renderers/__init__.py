"""A chat request becomes media requests, a prompt and engine input.

In: OpenAI messages, media URLs left where they are in the body. Out: token ids, placeholder
ranges and per-item tensors, delivered in the order in which the caches changed.
May import: models and below.
"""
