"""One call of a Hugging Face processor: our tokenizer inside it, plain values out of it."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from lazydecode.media.raw_video import RawVideo
from lazydecode.models.containers import ContainerReader
from lazydecode.models.media_steps import MediaSteps
from lazydecode.models.text_length import fit
from lazydecode.models.tokenization import PromptTokenizer
from lazydecode.models.torch_threads import one_torch_thread

TEXT_KEYS: Final = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "position_ids"}
)
"""Outputs that belong to the text, whatever the family."""
OFFSETS_KEY: Final = "text_replacement_offsets"
_PARTS: Final = {"image": "image_processor", "video": "video_processor"}
_METADATA_FIELDS: Final = (
    "total_num_frames",
    "fps",
    "width",
    "height",
    "duration",
    "video_backend",
    "frames_indices",
)


@dataclass(slots=True)
class Media:
    """The media of one call, per modality, in the order of the text."""

    images: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    """Frames, or (frames, metadata), or containers; containers only among themselves."""
    audios: list[Any] = field(default_factory=list)
    """Samples at the processor's own rate."""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.images or self.videos or self.audios)

    @classmethod
    def single(cls, modality: str, item: Any) -> Media:
        """Return the media of a call with one item."""
        return cls.of({modality: [item]})

    @classmethod
    def of(cls, items: Mapping[str, Sequence[Any]]) -> Media:
        """Return the media of a call from modality -> items."""
        return cls(
            list(items.get("image", ())), list(items.get("video", ())), list(items.get("audio", ()))
        )


@dataclass(frozen=True, slots=True)
class ProcessorOutput:
    """What a processor returned for one text."""

    input_ids: list[int]
    tensors: dict[str, Any]
    """Everything that does not belong to the text."""
    text_tensors: dict[str, Any]
    """What belongs to the text besides its ids."""
    offsets: list[dict[str, Any]]
    """The replacements as the class reports them; empty if it reports none."""
    text: str
    """The text that was tokenized last: placeholders are expanded in it."""
    add_special_tokens: bool
    video_metadata: Sequence[Any] = ()
    """What the class says of the videos that it read itself."""


class ProcessorCall:
    """Calls one Hugging Face processor. Threads may share it if the class is re-entrant.

    The processor is a shallow copy whose tokenizer is ours: it tokenizes runs once, understands
    marked text, and keeps no padding state that threads would share.

    Args:
        processor: The model's processor.
        tokenizer: Our tokenizer over the same vocabulary.
        options: Options of every call, as the processor takes them.
        scalar_metadata: Whether the class takes the metadata of one video instead of a list.
        containers: Reads videos that come as containers; None: none do.
        either_or: Whether the class takes a text or media, never both.
        lock: What a thread must hold inside the class; None: nothing.
    """

    def __init__(
        self,
        processor: Any,
        tokenizer: PromptTokenizer,
        options: Mapping[str, Any] | None = None,
        *,
        scalar_metadata: bool = False,
        containers: ContainerReader | None = None,
        either_or: bool = False,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.processor = processor
        self.tokenizer = tokenizer
        self.options = dict(options or {})
        self.scalar_metadata = scalar_metadata
        self.containers = containers
        self.either_or = either_or
        self.lock = nullcontext() if lock is None else lock
        parameters = inspect.signature(type(processor).__call__).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.audio_name = "audios" if "audios" in parameters else "audio"
        self.reports_offsets = takes_any
        self._media_steps = MediaSteps(processor)
        self.takes_text = "text" in parameters or takes_any
        bos = getattr(tokenizer.hf_tokenizer, "bos_token", None)
        self.bos_token: str | None = bos if isinstance(bos, str) and bos else None
        audio = audio_processor_of(processor)
        self.sampling_rate: int | None = getattr(audio, "sampling_rate", None)

    def __call__(
        self,
        text: str,
        media: Media,
        options: Mapping[str, Any] | None = None,
        *,
        substitutes: Mapping[str, Any] | None = None,
    ) -> ProcessorOutput:
        """Run the processor on one text and its media.

        Args:
            text: The prompt; marked tokens are codes. Left out beside media, if the class takes
                one or the other.
            media: Its items, in the order of the text.
            options: Options of this call, over those of every call.
            substitutes: Attribute name -> stand-in for a part of the processor.

        Raises:
            Exception: Whatever the processor raises.
        """
        processor, proxy = self._own_copy(substitutes)
        reported: list[dict[str, Any]] = []
        if hasattr(processor, "get_text_with_replacements"):
            processor.get_text_with_replacements = _listening(processor, reported)
        arguments = self._arguments(processor, text, media, options)
        with self.lock, one_torch_thread():
            output = processor(**arguments)
        return _split(dict(output), proxy, reported)

    def media_half(
        self,
        modality: str,
        text: str,
        media: Media,
        options: Mapping[str, Any] | None = None,
        *,
        substitutes: Mapping[str, Any] | None = None,
    ) -> ProcessorOutput | None:
        """As a call with one item, without the text's half: there are no ids in what it returns.

        None if that cannot be told apart from the rest.

        Args:
            modality: The item's.
            text: Its prompt.
            media: The item alone.
            options: As for a call.
            substitutes: As for a call.

        Raises:
            Exception: Whatever the processor raises.
        """
        has_containers = any(isinstance(video, RawVideo) for video in media.videos)
        if not self._media_steps.is_known or self.either_or or has_containers:
            return None
        processor, _ = self._own_copy(substitutes)
        arguments = self._arguments(processor, text, media, options)
        with self.lock, one_torch_thread():
            found = self._media_steps.run(processor, modality, text, arguments)
        if found is None:
            return None
        tensors, replacement = found
        metadata = tensors.pop("video_metadata", ())
        offsets = [{"type": modality, "replacement": replacement}]
        return ProcessorOutput([], tensors, {}, offsets, text, True, list(metadata))

    def _own_copy(self, substitutes: Mapping[str, Any] | None) -> tuple[Any, TokenizerProxy]:
        """Return the processor for one call, and the tokenizer in it."""
        proxy = TokenizerProxy(self.tokenizer, fits_length=self.either_or)
        processor = copy.copy(self.processor)
        processor.tokenizer = proxy
        for name, part in (substitutes or {}).items():
            setattr(processor, name, part)
        return processor, proxy

    def _arguments(
        self, processor: Any, text: str, media: Media, options: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return the arguments of a call; may change the processor for it."""
        arguments: dict[str, Any] = {**self.options, **(options or {}), "return_tensors": "pt"}
        if self.reports_offsets and (media.images or media.videos or media.audios):
            # Fuyu's class fails if it is asked for those of a prompt without images.
            arguments["return_text_replacement_offsets"] = True
        if self.bos_token is not None and text.startswith(self.bos_token):
            arguments.setdefault("add_special_tokens", False)
        if not (self.either_or and media):
            arguments["text"] = [text]
        if media.images:
            arguments["images"] = media.images
        raw = [video for video in media.videos if isinstance(video, RawVideo)]
        if raw:
            assert self.containers is not None and len(raw) == len(media.videos)
            # How frames are chosen is the class's own business then.
            processor.video_processor, arguments["videos"] = self.containers.open(raw)
            arguments["return_metadata"] = True
        elif media.videos:
            arguments["videos"] = [v[0] if isinstance(v, tuple) else v for v in media.videos]
            metadata = [v[1] for v in media.videos if isinstance(v, tuple)]
            if arguments.get("do_sample_frames"):
                metadata = [
                    as_if_whole(v[1], len(v[0])) for v in media.videos if isinstance(v, tuple)
                ]
            if metadata:
                # A fresh object each time: some classes write a default fps into it.
                arguments["video_metadata"] = self._metadata(metadata)
            arguments.setdefault(
                "do_sample_frames", any(m.get("do_sample_frames") for m in metadata)
            )
            arguments["return_metadata"] = True
        if media.audios:
            arguments[self.audio_name] = media.audios
            if self.sampling_rate is not None:
                arguments.setdefault("sampling_rate", self.sampling_rate)
        return arguments

    def _metadata(self, metadata: Sequence[Mapping[str, Any]]) -> Any:
        if not self.scalar_metadata:
            return [plain_metadata(m) for m in metadata]
        from transformers.video_utils import VideoMetadata

        return VideoMetadata(**plain_metadata(metadata[0]))


def _listening(processor: Any, reported: list[dict[str, Any]]) -> Any:
    """Return the processor's own search for placeholders, which also notes what it replaced.

    Some classes use it and keep the result to themselves.
    """
    search = processor.get_text_with_replacements

    def get_text_with_replacements(*args: Any, **kwargs: Any) -> Any:
        text, offsets = search(*args, **kwargs)
        reported[:] = list(offsets[0]) if offsets else []
        return text, offsets

    return get_text_with_replacements


def plain_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return those facts about a decoded video that transformers knows."""
    return {name: metadata[name] for name in _METADATA_FIELDS if name in metadata}


def as_if_whole(metadata: Mapping[str, Any], num_frames: int) -> dict[str, Any]:
    """Return metadata that takes the decoded frames for the whole video.

    A processor that samples picks from the frames that it is given, by the count and the rate
    that the metadata states. The times of what it keeps are then those in the source, as far as
    the decoder's choice was even.
    """
    if num_frames == metadata.get("total_num_frames"):
        return dict(metadata)
    whole = {
        **metadata,
        "total_num_frames": num_frames,
        "frames_indices": list(range(num_frames)),
    }
    times = metadata.get("timestamps") or []
    if len(times) == num_frames > 1 and times[-1] > times[0]:
        whole["fps"] = (num_frames - 1) / (times[-1] - times[0])
    elif metadata.get("duration"):
        whole["fps"] = num_frames / metadata["duration"]
    return whole


def audio_processor_of(processor: Any) -> Any | None:
    """Return the part of a processor that takes audio."""
    for name in ("audio_processor", "feature_extractor"):
        part = getattr(processor, name, None)
        if part is not None:
            return part
    return None


def processor_modalities(processor: Any) -> tuple[str, ...]:
    """Return the modalities that a processor has parts for."""
    found = [m for m, part in _PARTS.items() if getattr(processor, part, None) is not None]
    if audio_processor_of(processor) is not None:
        found.append("audio")
    return tuple(found)


def _split(
    output: dict[str, Any], proxy: TokenizerProxy, reported: list[dict[str, Any]]
) -> ProcessorOutput:
    """Sort a processor's outputs into those of the text and those of the items."""
    ids = output.pop("input_ids", None)
    ids = [] if ids is None else _first_row(ids)
    offsets = output.pop(OFFSETS_KEY, None) or []
    offsets = list(offsets[0]) if offsets and isinstance(offsets[0], list) else list(offsets)
    offsets = offsets or reported
    metadata = output.pop("video_metadata", None)
    text_tensors: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for name, value in output.items():
        shape = tuple(getattr(value, "shape", ()))
        belongs_to_text = name in TEXT_KEYS or (len(ids) > 1 and shape[:2] == (1, len(ids)))
        (text_tensors if belongs_to_text else tensors)[name] = value
    return ProcessorOutput(
        ids,
        tensors,
        text_tensors,
        offsets,
        proxy.last_text,
        proxy.last_add_special_tokens,
        list(metadata) if isinstance(metadata, list | tuple) else (),
    )


def _first_row(ids: Any) -> list[int]:
    rows = ids.tolist() if hasattr(ids, "tolist") else ids
    return list(rows[0]) if rows and isinstance(rows[0], list) else list(rows)


class TokenizerProxy:
    """Stands in for the tokenizer inside one processor call; remembers what it was asked.

    Only what a processor does with one text is answered here, at the cost of collapsed runs;
    everything else is the real tokenizer's. One object serves one call.

    Args:
        tokenizer: Ours.
        fits_length: Whether padding to a length and truncation are done where they are asked
            for: to a text that is embedded as a whole, and not to a prompt.
    """

    def __init__(self, tokenizer: PromptTokenizer, *, fits_length: bool = False) -> None:
        self._own = tokenizer
        self._fits_length = fits_length
        self.last_text = ""
        self.last_add_special_tokens = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own.hf_tokenizer, name)

    def __len__(self) -> int:
        return len(self._own.hf_tokenizer)

    def __call__(
        self,
        text: Any,
        text_pair: Any = None,
        *,
        add_special_tokens: bool = True,
        return_tensors: Any = None,
        return_token_type_ids: bool | None = None,
        return_attention_mask: bool | None = None,
        **lengths: Any,
    ) -> Any:
        """Tokenize one text or a list of texts; padding to the longest never applies to one."""
        if text_pair is not None:
            raise ValueError("a pair of texts is not a prompt")
        texts = [text] if isinstance(text, str) else list(text)
        self.last_text = texts[-1] if texts else ""
        self.last_add_special_tokens = add_special_tokens
        rows = [self._own.encode(t, add_special_tokens=add_special_tokens) for t in texts]
        if self._fits_length:
            rows = fit(self._own, rows, texts, lengths)
        length = max(map(len, rows), default=0)
        names = self._own.hf_tokenizer.model_input_names
        if return_tensors is not None and any(len(row) != length for row in rows):
            raise ValueError("texts of different length do not make one tensor")
        data: dict[str, Any] = {"input_ids": rows}
        if return_token_type_ids or (return_token_type_ids is None and "token_type_ids" in names):
            data["token_type_ids"] = [[0] * len(row) for row in rows]
        if return_attention_mask or return_attention_mask is None:
            data["attention_mask"] = [[1] * len(row) for row in rows]
        if isinstance(text, str) and return_tensors is None:
            data = {name: value[0] for name, value in data.items()}
        encoding = _encoding_class()(data, tensor_type=return_tensors)
        encoding.locate = self._own.locate
        encoding.texts = texts
        return encoding

    def encode(self, text: str, add_special_tokens: bool = True, **_unused: Any) -> list[int]:
        """Return the ids of one text."""
        return self._own.encode(text, add_special_tokens=add_special_tokens)


@functools.cache
def _encoding_class() -> Any:
    """Return a BatchEncoding that finds tokens by character without the fast tokenizer's own."""
    from transformers import BatchEncoding

    class LocatingEncoding(BatchEncoding):  # type: ignore[misc]  # transformers is untyped
        locate: Any = None
        texts: Any = ()

        def char_to_token(
            self, batch_or_char_index: int, char_index: int | None = None, sequence_index: int = 0
        ) -> int | None:
            """Return the token that holds a character of a text."""
            row, char = (
                (0, batch_or_char_index)
                if char_index is None
                else (batch_or_char_index, char_index)
            )
            found: int | None = self.locate(self.texts[row], char)
            return found

    return LocatingEncoding
