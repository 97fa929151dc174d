"""lazydecode: media cross a serving system encoded, and are decoded only when a cache lacks them.

In: media of chat requests (URLs, bytes, files). Out: `media.MediaRef`s, prompt token ids,
placeholder ranges and tensors for a multimodal language model. Importing this package imports
nothing else; `lazydecode.media` needs neither torch nor transformers.
"""

__version__ = "0.1.0"
