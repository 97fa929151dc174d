"""From a request's media, or embeddings in their place, to item groups; for any family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lazydecode.models.embedding_inputs import ItemEmbeddings
from lazydecode.parse import ModalityDataItems, MultiModalDataParser

_Parse = Callable[[Any], ModalityDataItems[Any, Any]]


class GenericDataParser(MultiModalDataParser):
    """Parses media for any family: videos keep their metadata where they have any.

    Args:
        target_sr: Rate in Hz to which audio is brought; None leaves it as it is.
        embeddings: Which embeddings the family takes; None: none.
    """

    def __init__(self, target_sr: float | None, embeddings: ItemEmbeddings | None) -> None:
        super().__init__(
            target_sr=target_sr,
            video_needs_metadata=True,
            expected_hidden_size=None if embeddings is None else embeddings.hidden_size,
        )
        self._embeddings = embeddings
        self._subparsers = {
            modality: self._or_embeddings(modality, parse)
            for modality, parse in super()._get_subparsers().items()
        }

    def _get_subparsers(self) -> Mapping[str, _Parse]:
        return self._subparsers

    def _or_embeddings(self, modality: str, parse: _Parse) -> _Parse:
        """Return a parser that also takes embeddings, in the form that the family wants."""
        embeddings = self._embeddings

        def parse_either(data: Any) -> ModalityDataItems[Any, Any]:
            if (
                embeddings is not None
                and not isinstance(data, list)  # as nearly always
                and modality in embeddings.rules
                and isinstance(data, Mapping)
            ):
                return embeddings.group(modality, data)
            items = parse(data)
            if items.holds_embeddings:
                if embeddings is None:
                    raise ValueError(f"the model takes no {modality} embeddings")
                embeddings.check_alone(modality)
            return items

        return parse_either

    def _split_video(self, video: Any) -> Any:
        frames, metadata = video if isinstance(video, tuple) else (video, None)
        return frames if metadata is None else (frames, metadata)
