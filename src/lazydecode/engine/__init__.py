"""Token ids and per-item tensors in, generated tokens out, from a process of its own.

`protocol` says what an engine is, `client` is the front end's side, `core` the engine process
with its receiver cache, `transformers` the embedded model runner, and `wire` the form in which
items leave for other engines. May import: models and below; torch inside, never at import here.
"""
