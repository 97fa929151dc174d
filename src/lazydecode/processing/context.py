"""What processing knows about the model: its configuration, its decoders, its limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from lazydecode.errors import TooManyItemsError
from lazydecode.inputs import MultiModalDataDict
from lazydecode.limits import DecodeLimits
from lazydecode.media.audio import AudioMediaIO
from lazydecode.media.base import MediaIO, MediaRef
from lazydecode.media.estimate import estimate_decoded_bytes
from lazydecode.media.image import ImageMediaIO
from lazydecode.media.video import VideoMediaIO
from lazydecode.parse import MultiModalDataItems, MultiModalDataParser
from lazydecode.processing.prompt_updates import Tokenizer


@dataclass(frozen=True, slots=True)
class MultiModalConfig:
    """How media are handled for one model."""

    mm_processor_cache_gb: float = 4.0
    """Size of the processor cache in GiB; 0: no cache."""
    mm_hasher_algorithm: str = "sha256"
    """Digest of identities in the processor cache."""
    limit_per_prompt: Mapping[str, int] = field(default_factory=dict)
    """Items that one request may have, per modality."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model that is served, as processing needs to know it."""

    model: str
    """Name or folder: part of every identity."""
    hf_config: Any = None
    """The Hugging Face configuration object."""
    multimodal_config: MultiModalConfig = field(default_factory=MultiModalConfig)
    video_processor_cls_name: str | None = None
    """Class of the model's HF video processor; None: read from the model's folder."""

    def get_multimodal_config(self) -> MultiModalConfig:
        """Return how media are handled."""
        return self.multimodal_config


def get_video_processor_cls_name(model_config: Any) -> str | None:
    """Return the name of the model's HF video processor class; None if it has none."""
    stated = getattr(model_config, "video_processor_cls_name", None)
    if isinstance(stated, str):
        return stated
    model = getattr(model_config, "model", None)
    folder = Path(model) if isinstance(model, str) else None
    if folder is None or not folder.is_dir():
        return None
    for name in ("video_preprocessor_config.json", "processor_config.json"):
        try:
            content = json.loads((folder / name).read_bytes())
        except (OSError, ValueError):
            continue
        if not isinstance(content, dict):
            continue
        nested = content.get("video_processor")
        for part in (nested, content):
            kind = part.get("video_processor_type") if isinstance(part, dict) else None
            if isinstance(kind, str):
                return kind
    return None


VIDEO_BACKEND_OF_PROCESSOR: Final[Mapping[str, str]] = {"Qwen2VLVideoProcessor": "qwen2_vl"}
"""HF video processor class -> the video backend that samples frames as it expects."""


@dataclass(frozen=True, slots=True)
class InputProcessingContext:
    """What a model's processing works with."""

    model_config: Any
    """A `ModelConfig`, or anything with the same attributes."""
    tokenizer: Tokenizer | None
    decode_limits: DecodeLimits = field(default_factory=DecodeLimits)
    """What one decode may produce."""
    trust_exif_image_id: bool = True
    """Whether an EXIF ImageID is an image's identity; only for a single tenant."""
    video_loader_backend: str | None = None
    """Video backend for models that are bound to none; None: the decoder's own default."""
    hf_processor: Any = None
    """The Hugging Face processor object, where the default `_call_hf_processor` is used."""

    def get_mm_config(self) -> Any:
        """Return how media are handled, a `MultiModalConfig`."""
        return self.model_config.get_multimodal_config()

    def get_hf_config(self) -> Any:
        """Return the Hugging Face configuration object."""
        return self.model_config.hf_config


class BaseProcessingInfo:
    """What one model family says about its media; families override what differs."""

    def __init__(self, ctx: InputProcessingContext) -> None:
        self.ctx = ctx

    @property
    def model_id(self) -> str:
        """The name of the model in identities."""
        return str(self.ctx.model_config.model)

    @cached_property
    def identity_scope(self) -> tuple[str, str]:
        """The model's name, and the digest of identities: what all of them depend on."""
        return self.model_id, self.ctx.get_mm_config().mm_hasher_algorithm

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Return modality -> items per request that the family takes; None is no limit.

        Empty: every modality that the parser knows, without limit.
        """
        return {}

    def get_allowed_mm_limits(self) -> dict[str, int | None]:
        """Return the limits of the family and of the configuration, the lower one each."""
        limits = dict(self.get_supported_mm_limits())
        get_config = getattr(self.ctx.model_config, "get_multimodal_config", None)
        configured = getattr(get_config(), "limit_per_prompt", {}) if get_config else {}
        for modality, limit in configured.items():
            known = limits.get(modality)
            limits[modality] = limit if known is None else min(known, limit)
        return limits

    def get_data_parser(self) -> MultiModalDataParser:
        """Return the parser with what the family's processor expects."""
        return MultiModalDataParser()

    def parse_mm_data(
        self, mm_data: MultiModalDataDict, *, validate: bool = True
    ) -> MultiModalDataItems:
        """Return the item groups of a request; nothing is decoded.

        Raises:
            TooManyItemsError: With `validate`, if a modality has more items than allowed.
            ValueError: If an item has no usable form.
        """
        items = self.get_data_parser().parse_mm_data(mm_data)
        if validate:
            limits = self.get_allowed_mm_limits()
            for modality, count in items.get_all_counts().items():
                self.validate_num_items(modality, count, limits)
        return items

    def validate_num_items(
        self, modality: str, count: int, limits: Mapping[str, int | None] | None = None
    ) -> None:
        """Check the number of items of a modality.

        Raises:
            TooManyItemsError: If there are more than allowed.
        """
        limit = (self.get_allowed_mm_limits() if limits is None else limits).get(modality)
        if limit is not None and count > limit:
            raise TooManyItemsError(
                f"The request has {count} {modality} items; at most {limit} are allowed",
                modality=modality,
                index=limit,
            )

    def get_media_io(
        self, modality: str, media_io_kwargs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> MediaIO[Any]:
        """Return the decoder for a modality, with its resolved options.

        Args:
            modality: `image`, `audio` or `video`.
            media_io_kwargs: Modality -> decode options.

        Raises:
            ValueError: If the modality has no decoder, or an option is wrong.
        """
        options = dict((media_io_kwargs or {}).get(modality) or {})
        limits = self.ctx.decode_limits
        if modality == "audio":
            return AudioMediaIO(limits=limits, **options)
        image_options = dict((media_io_kwargs or {}).get("image") or {})
        image_io = ImageMediaIO(
            limits=limits, trust_exif_image_id=self.ctx.trust_exif_image_id, **image_options
        )
        if modality == "image":
            return image_io
        if modality == "video":
            if options.get("video_backend") is None:
                backend = self._default_video_backend()
                if backend is not None:
                    options["video_backend"] = backend
            return VideoMediaIO(image_io, limits=limits, **options)
        raise ValueError(f"modality {modality!r} has no decoder")

    def estimate_decoded_bytes(
        self, modality: str, ref: MediaRef[Any], options: Mapping[str, Any]
    ) -> int:
        """Return about how many bytes decoding an item and reading it will hold.

        Args:
            modality: The item's modality.
            ref: The item; only its header is read.
            options: The request's processor options.
        """
        return estimate_decoded_bytes(ref)

    def _default_video_backend(self) -> str | None:
        kind = get_video_processor_cls_name(self.ctx.model_config)
        bound = None if kind is None else VIDEO_BACKEND_OF_PROCESSOR.get(kind)
        return self.ctx.video_loader_backend if bound is None else bound
