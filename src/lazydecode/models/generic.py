"""Every family's processing, without code per family: item by item, on the model's own class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from lazydecode.errors import InvalidRequestError, LazyDecodeError
from lazydecode.inputs import MultiModalKwargsItem, PlaceholderRange
from lazydecode.media.audio import resampled_length
from lazydecode.media.base import AudioHeader, ImageHeader, MediaIO, MediaRef, VideoHeader
from lazydecode.media.raw_video import RAW_VIDEO_DECODER, RawVideoMediaIO
from lazydecode.media.video import VideoMediaIO, plan_frames
from lazydecode.models.chunks import (
    VISION_CHUNK,
    ChunkPlan,
    VideoSplitter,
    for_chunk,
    ranges_of_chunks,
    texts_of_items,
)
from lazydecode.models.containers import ContainerReader
from lazydecode.models.data_parser import GenericDataParser
from lazydecode.models.embedding_inputs import ItemEmbeddings, embeds_name, kwargs_item
from lazydecode.models.expansion import ItemText
from lazydecode.models.family import Family, Sketch
from lazydecode.models.header_only import video_shape
from lazydecode.models.item import ProcessedItem, shape_of
from lazydecode.models.randomness import set_apart
from lazydecode.parse import (
    MultiModalDataItems,
    MultiModalDataParser,
    ProcessorBatchItems,
    VisionChunkProcessorItems,
)
from lazydecode.processing.context import BaseProcessingInfo, InputProcessingContext
from lazydecode.processing.failures import decode_error
from lazydecode.processing.flights import ItemFlights
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.processing.outputs import ItemOutput
from lazydecode.processing.processor import BaseMultiModalProcessor


class GenericProcessingInfo(BaseProcessingInfo):
    """What the probes of a family say about its media.

    Args:
        ctx: The model.
        max_items: Modality -> items per request that the family takes; None: any number.
        sampling_rate: Rate in Hz that its audio processor takes; None: it has none.
        embeddings: Which embeddings it takes in the place of media; None: none.
        containers: What reads videos for a family that opens them itself; else None.
    """

    def __init__(
        self,
        ctx: InputProcessingContext,
        *,
        max_items: Mapping[str, int | None],
        sampling_rate: int | None,
        embeddings: ItemEmbeddings | None = None,
        containers: ContainerReader | None = None,
    ) -> None:
        super().__init__(ctx)
        self._containers = containers
        self._max_items = dict(max_items)
        self.embeddings = embeddings
        self._parser = GenericDataParser(sampling_rate, embeddings)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Return the limits that the probes found."""
        return self._max_items

    def get_data_parser(self) -> MultiModalDataParser:
        """Return the parser; it is shared, as it keeps nothing."""
        return self._parser

    def get_media_io(
        self, modality: str, media_io_kwargs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> MediaIO[Any]:
        """As in the base class; a family that opens videos itself gets them undecoded.

        Options for videos say how to decode them, and are then followed.
        """
        media_io = super().get_media_io(modality, media_io_kwargs)
        if self._containers is None or (media_io_kwargs or {}).get(modality):
            return media_io
        if not isinstance(media_io, VideoMediaIO):
            return media_io
        return RawVideoMediaIO(media_io, limits=self.ctx.decode_limits)

    def estimate_decoded_bytes(
        self, modality: str, ref: MediaRef[Any], options: Mapping[str, Any]
    ) -> int:
        """As in the base class; of a container, what the family's class reads of it."""
        header = ref.header
        if self._containers is None or not is_container(ref) or not isinstance(header, VideoHeader):
            return super().estimate_decoded_bytes(modality, ref, options)
        plan = self._containers.plan(header, options)
        # Without a plan: two frames a second, as the classes do that open videos themselves.
        frames = int((header.duration_s or 0) * 2) + 1 if plan is None else _count(plan)
        return frames * header.width * header.height * 3


@dataclass(frozen=True, slots=True)
class HeaderRendering:
    """What a prompt becomes, known from the headers of its media alone."""

    token_ids: list[int]
    placeholders: dict[str, list[PlaceholderRange]]
    metadata: dict[str, list[MultiModalKwargsItem]]
    """Modality -> per item its small tensors (grids and sizes)."""


class GenericMultiModalProcessor(BaseMultiModalProcessor):
    """Processes any family whose Hugging Face class was proven at load.

    An item's result is its tensors and one `ItemText`; nothing about its neighbours is in it.

    Args:
        info: What the family says about its media.
        family: The loaded family.
        splitter: Cuts videos, for a model that wants pictures and chunks of videos as items of
            one modality; else None.
        flights: See `BaseMultiModalProcessor`.
        media_executor: Runs decodes.
    """

    per_item = True

    def __init__(
        self,
        info: BaseProcessingInfo,
        family: Family,
        *,
        splitter: VideoSplitter | None = None,
        flights: ItemFlights | None = None,
        media_executor: Executor | None = None,
    ) -> None:
        super().__init__(info, flights=flights, media_executor=media_executor)
        self.family = family
        self.splitter = splitter
        self.reentrant = family.record.reentrant
        self.items_in_prompt = family.items_in_prompt

    def set_apart(self, inputs: ProcessorInputs) -> ProcessorInputs:
        """Return the inputs with identities of their own for items with chance in them."""
        return set_apart(inputs, self.family.random(inputs.hf_processor_mm_kwargs))

    def render_from_headers(self, inputs: ProcessorInputs) -> HeaderRendering | None:
        """Return ids, ranges and small tensors without decoding anything.

        What is decoded already counts with its true size; what the cache holds is known, its small
        tensors only if they are in this process. None if one of the items does not
        say enough: a file without a readable header, a family whose count follows from content.

        Raises:
            InvalidRequestError: If the model's processor refuses a size, or the prompt has not
                one placeholder per item.
        """
        options = inputs.hf_processor_mm_kwargs
        sketches: dict[str, list[Sketch]] = {}
        for modality, items in inputs.mm_data_items.items():
            sketches[modality] = []
            for position in range(items.get_count()):
                sketch = self._cached_sketch(inputs, modality, position)
                if sketch is None:
                    sketch = self._sketch(modality, items, position, options)
                if sketch is None:
                    return None
                sketches[modality].append(sketch)
        texts = {m: [sketch.text for sketch in group] for m, group in sketches.items()}
        token_ids, placeholders = self._build_prompt(inputs, texts)
        metadata = {m: [sketch.metadata for sketch in group] for m, group in sketches.items()}
        return HeaderRendering(token_ids, placeholders, metadata)

    def render_known(self, inputs: ProcessorInputs) -> HeaderRendering | None:
        """Return what `render_from_headers` does, in time that does not depend on the items.

        For an event loop, with a short prompt. None unless all items are images whose headers
        are read and whose sizes were met before, and nothing has to be waited for.

        Raises:
            InvalidRequestError: As `render_from_headers`.
        """
        if not self.family.builds_unlocked or inputs.mm_data_items.keys() != {"image"}:
            return None
        texts: list[ItemText] = []
        metadata: list[MultiModalKwargsItem] = []
        for item in inputs.mm_data_items["image"].get_all_raw():
            header = item.header if isinstance(item, MediaRef) and item.knows_header else None
            if not isinstance(header, ImageHeader):
                return None
            shape = (header.height, header.width)
            sketch = self.family.known_sketch("image", shape, inputs.hf_processor_mm_kwargs)
            if sketch is None:
                return None
            texts.append(sketch.text)
            metadata.append(sketch.metadata)
        token_ids, placeholders = self._build_prompt(inputs, {"image": texts})
        return HeaderRendering(token_ids, placeholders, {"image": metadata})

    def render_cached(self, inputs: ProcessorInputs) -> HeaderRendering | None:
        """Return what `render_from_headers` does for items that the cache holds, without a trace.

        For an event loop, with a short prompt. None unless all of them can be had so, and nothing
        has to be waited for.

        Raises:
            InvalidRequestError: As `render_from_headers`.
        """
        if not self.family.builds_unlocked or inputs.sound_pairs:
            return None
        texts: dict[str, list[ItemText]] = {}
        metadata: dict[str, list[MultiModalKwargsItem]] = {}
        for modality, items in inputs.mm_data_items.items():
            texts[modality], metadata[modality] = [], []
            for position in range(items.get_count()):
                sketch = self._cached_sketch(inputs, modality, position)
                if sketch is None:
                    return None
                texts[modality].append(sketch.text)
                metadata[modality].append(sketch.metadata)
        token_ids, placeholders = self._build_prompt(inputs, texts)
        return HeaderRendering(token_ids, placeholders, metadata)

    @staticmethod
    def _cached_sketch(inputs: ProcessorInputs, modality: str, position: int) -> Sketch | None:
        if inputs.cache is None or inputs.mm_hash_items is None:
            return None
        held = inputs.cache.peek_item(inputs.mm_hash_items[modality][position])
        return None if held is None else Sketch(held[1][0], _small_part(held[0]))

    def _sketch(
        self,
        modality: str,
        items: Any,
        position: int,
        options: Mapping[str, Any],
    ) -> Sketch | None:
        if not isinstance(items, ProcessorBatchItems):
            given = self._embeddings(modality, items, position)
            return Sketch(given.text, _small_part(given.kwargs))
        item = items.get_raw(position)
        if item is None:
            return None
        modality, index = items.get_client_position(position)
        containers = self.family.call.containers
        try:
            if isinstance(items, VisionChunkProcessorItems) and modality == "video":
                metadata = items.metadata[position]
                shape = None if metadata is None else video_shape(metadata)
                options = for_chunk(options)
            elif containers is not None and isinstance(item, MediaRef) and is_container(item):
                header = item.header
                if not isinstance(header, VideoHeader):
                    return None
                merged = self.family.options.merge(options)
                plan = containers.plan(header, merged)
                shape = None if plan is None else video_shape(plan)
                options = {**options, "do_sample_frames": False}
            elif isinstance(item, MediaRef) and not item.is_decoded:
                shape = shape_from_header(modality, item, self.family.call.sampling_rate)
            else:
                shape = shape_of(modality, items.get(position))
        except LazyDecodeError as exc:
            # What the decode would say too: an option does not fit what the header states.
            raise decode_error(modality, index, exc) from exc
        if shape is None:
            return None
        try:
            return self.family.sketch(modality, shape, options)
        except InvalidRequestError as exc:
            raise exc.at(modality, index) from exc

    def _process_missing(
        self, missing: MultiModalDataItems, inputs: ProcessorInputs
    ) -> dict[str, list[ItemOutput]]:
        options = inputs.hf_processor_mm_kwargs
        outputs: dict[str, list[ItemOutput]] = {}
        for modality, items in missing.items():
            outputs[modality] = []
            for position in range(items.get_count()):
                if not isinstance(items, ProcessorBatchItems):
                    processed = self._embeddings(modality, items, position)
                else:
                    origin, _ = items.get_client_position(position)
                    is_chunk = modality == VISION_CHUNK and origin == "video"
                    processed = self.family.process(
                        origin, items.get(position), for_chunk(options) if is_chunk else options
                    )
                outputs[modality].append(ItemOutput(processed.kwargs, (processed.text,)))
        return outputs

    def _embeddings(self, modality: str, items: Any, position: int) -> ProcessedItem:
        """Return tensors and text of an item that came as embeddings: as many placeholders as
        it has tokens."""
        item = items.get(position)
        name = embeds_name(modality)
        tensors = dict(item) if isinstance(item, Mapping) else {name: item}
        placeholder = self.family.facts.modalities[modality].placeholder
        text = self.family.tokenizer.collapse(placeholder * len(tensors[name]))
        return ProcessedItem(kwargs_item(modality, tensors), ItemText(modality, text))

    def _finish_prompt(
        self,
        inputs: ProcessorInputs,
        mm_kwargs: Mapping[str, Sequence[MultiModalKwargsItem | None]],
        updates: dict[str, list[Sequence[Any]]],
    ) -> tuple[list[int], dict[str, list[PlaceholderRange]]]:
        texts: dict[str, list[ItemText]] = {
            modality: [item_updates[0] for item_updates in group]
            for modality, group in updates.items()
        }
        return self._build_prompt(inputs, texts)

    def _build_prompt(
        self, inputs: ProcessorInputs, texts: Mapping[str, Sequence[ItemText]]
    ) -> tuple[list[int], dict[str, list[PlaceholderRange]]]:
        options = inputs.hf_processor_mm_kwargs
        tenant = inputs.cache_salt
        chunks = inputs.mm_data_items.get(VISION_CHUNK)
        if chunks is None or not isinstance(chunks, VisionChunkProcessorItems):
            built = self.family.build_prompt(
                inputs.prompt, texts, options, pairs=inputs.sound_pairs, tenant=tenant
            )
            return built.token_ids, built.placeholders
        others = {m: group for m, group in texts.items() if m != VISION_CHUNK}
        whole = texts_of_items(chunks.origins, texts[VISION_CHUNK])
        built = self.family.build_prompt(inputs.prompt, {**whole, **others}, options, tenant=tenant)
        ranges = {m: built.placeholders[m] for m in others}
        ranges[VISION_CHUNK] = ranges_of_chunks(chunks.origins, built.placeholders)
        return built.token_ids, ranges

    def plan_video_chunks(
        self, metadata: Mapping[str, Any], options: Mapping[str, Any]
    ) -> list[ChunkPlan]:
        """Return the chunks of a video by what its decoder says about it.

        Raises:
            InvalidRequestError: If the model's processor refuses the options.
        """
        assert self.splitter is not None
        return self.splitter.plan(metadata, self.family.options.merge(options))

    def split_video_chunks(
        self, video: tuple[Any, Mapping[str, Any]], options: Mapping[str, Any]
    ) -> list[Any]:
        """Return (frames, metadata) of each chunk of a decoded video.

        Raises:
            InvalidRequestError: If the model's processor refuses the options.
        """
        assert self.splitter is not None
        return self.splitter.split(video, self.family.options.merge(options))


def _small_part(item: MultiModalKwargsItem | None) -> MultiModalKwargsItem:
    """The tensors of an item that stay on the CPU: grids and sizes."""
    return MultiModalKwargsItem(
        {} if item is None else {n: e for n, e in item.items() if e.field.keep_on_cpu}
    )


def is_container(ref: MediaRef[Any]) -> bool:
    """Whether an item is handed to the family's class as a container."""
    return ref.spec.settings.get("decoder") == RAW_VIDEO_DECODER


def _count(metadata: Mapping[str, Any]) -> int:
    return len(metadata["frames_indices"])


def shape_from_header(
    modality: str, ref: MediaRef[Any], sampling_rate: int | None
) -> tuple[Any, ...] | None:
    """Return the size that the item will have once it is decoded; None if unknown."""
    header = ref.header
    if modality == "image" and isinstance(header, ImageHeader):
        return (header.height, header.width)
    if modality == "audio" and isinstance(header, AudioHeader):
        if header.num_samples is None:
            return None
        rate = sampling_rate or header.rate_hz
        return (resampled_length(header.num_samples, header.rate_hz, rate),)
    if modality == "video" and isinstance(header, VideoHeader):
        metadata = plan_frames(ref.spec, header)
        return None if metadata is None else video_shape(metadata)
    return None
