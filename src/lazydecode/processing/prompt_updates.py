"""What stands in the prompt for each item: targets, replacements, insertions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray


class Tokenizer(Protocol):
    """The part of a tokenizer that prompts need."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Return the token ids of `text`."""
        ...

    def decode(self, token_ids: Sequence[int], /) -> str:
        """Return the text of `token_ids`."""
        ...


PromptSeq: TypeAlias = "str | list[int]"
"""A piece of prompt: text, or token ids."""

EmbedMask: TypeAlias = Callable[[Tokenizer | None, list[int]], NDArray[np.bool_]]
"""Given the token ids of the full content, which of them take an embedding."""


def seq_to_ids(tokenizer: Tokenizer | None, seq: PromptSeq) -> list[int]:
    """Return `seq` as token ids, without special tokens around it.

    Raises:
        ValueError: If it is text and there is no tokenizer.
    """
    if not isinstance(seq, str):
        return seq
    if tokenizer is None:
        raise ValueError("a text prompt update needs a tokenizer")
    return list(tokenizer.encode(seq, add_special_tokens=False))


def seq_to_text(tokenizer: Tokenizer | None, seq: PromptSeq) -> str:
    """Return `seq` as text.

    Raises:
        ValueError: If it is token ids and there is no tokenizer.
    """
    if isinstance(seq, str):
        return seq
    if tokenizer is None:
        raise ValueError("prompt updates of token ids need a tokenizer to become text")
    return tokenizer.decode(seq)


@dataclass(frozen=True, slots=True)
class PromptIndexTarget:
    """A place in the prompt rather than content that is in it."""

    kind: Literal["start", "prefix", "end"]
    prefix: PromptSeq | None = None

    def token_index(self, tokenizer: Tokenizer | None, prompt: Sequence[int]) -> int | None:
        """Return the place in a prompt of token ids; None if the prefix is not there."""
        if self.kind == "end":
            return len(prompt)
        if self.prefix is None:
            return 0
        ids = seq_to_ids(tokenizer, self.prefix)
        return len(ids) if list(prompt[: len(ids)]) == ids else None

    def text_index(self, tokenizer: Tokenizer | None, prompt: str) -> int | None:
        """Return the place in a text prompt; None if the prefix is not there."""
        if self.kind == "end":
            return len(prompt)
        if self.prefix is None:
            return 0
        text = seq_to_text(tokenizer, self.prefix)
        return len(text) if prompt.startswith(text) else None


class PromptIndexTargets:
    """The places that an update can name."""

    @staticmethod
    def start() -> PromptIndexTarget:
        """Before the first token."""
        return PromptIndexTarget("start")

    @staticmethod
    def prefix(seq: PromptSeq) -> PromptIndexTarget:
        """After `seq`, with which the prompt must begin."""
        return PromptIndexTarget("prefix", seq)

    @staticmethod
    def end() -> PromptIndexTarget:
        """After the last token."""
        return PromptIndexTarget("end")


PromptTarget: TypeAlias = "str | list[int] | PromptIndexTarget"


@dataclass(frozen=True, slots=True)
class PromptUpdateDetails:
    """Content of an update, and which part of it takes embeddings."""

    full: PromptSeq
    """Everything that is put into the prompt."""
    is_embed: EmbedMask | None = None
    """Which tokens of `full` take an embedding; None: all of them."""

    @staticmethod
    def from_seq(seq: PromptSeq) -> PromptUpdateDetails:
        """Every token of `seq` takes an embedding."""
        return PromptUpdateDetails(seq)

    @staticmethod
    def select_text(seq: PromptSeq, embed_text: str) -> PromptUpdateDetails:
        """The tokens of every occurrence of `embed_text` in `seq` take an embedding."""
        return PromptUpdateDetails(seq, _TextMask(embed_text))

    @staticmethod
    def select_token_id(seq: PromptSeq, embed_token_id: int) -> PromptUpdateDetails:
        """The tokens equal to `embed_token_id` take an embedding."""
        return PromptUpdateDetails.select_token_ids(seq, [embed_token_id])

    @staticmethod
    def select_token_ids(seq: PromptSeq, embed_token_ids: Sequence[int]) -> PromptUpdateDetails:
        """The tokens that are among `embed_token_ids` take an embedding."""
        return PromptUpdateDetails(seq, _TokenMask(tuple(embed_token_ids)))


@dataclass(frozen=True, slots=True)
class _TokenMask:
    """A mask by token id; a class instead of a closure, so that updates can be pickled."""

    token_ids: tuple[int, ...]

    def __call__(self, tokenizer: Tokenizer | None, full: list[int]) -> NDArray[np.bool_]:
        ids = np.asarray(full, dtype=np.int64)
        mask = np.zeros(len(full), dtype=np.bool_)
        for token_id in self.token_ids:  # A handful; `np.isin` sorts, at fifty times the price.
            mask |= ids == token_id
        return mask


@dataclass(frozen=True, slots=True)
class _TextMask:
    text: str

    def __call__(self, tokenizer: Tokenizer | None, full: list[int]) -> NDArray[np.bool_]:
        wanted = seq_to_ids(tokenizer, self.text)
        mask = np.zeros(len(full), dtype=np.bool_)
        if not wanted:
            return mask
        start = 0
        while (start := find_ids(full, wanted, start)) >= 0:
            mask[start : start + len(wanted)] = True
            start += len(wanted)
        return mask


def find_ids(ids: list[int], wanted: list[int], start: int = 0) -> int:
    """Return the first position from `start` where `wanted` stands in `ids`; -1 if nowhere."""
    first, length = wanted[0], len(wanted)
    last = len(ids) - length
    while start <= last:
        try:
            start = ids.index(first, start, last + 1)
        except ValueError:
            return -1
        if length == 1 or ids[start : start + length] == wanted:
            return start
        start += 1
    return -1


PromptUpdateContent: TypeAlias = "PromptSeq | PromptUpdateDetails"
Content: TypeAlias = "PromptUpdateContent | Callable[[int], PromptUpdateContent]"
Target: TypeAlias = "PromptTarget | Callable[[int], PromptTarget]"


@dataclass(frozen=True)
class ResolvedPromptUpdate:
    """An update for one item, with nothing left to compute but token ids."""

    modality: str
    item_index: int
    """Position of the item within its modality, in the request that uses the update."""
    mode: Literal["replace", "insert"]
    target: PromptTarget
    content: PromptUpdateDetails
    _ids: dict[str, list[int]] = field(default_factory=dict, repr=False, compare=False)
    """What was computed once, shared by the copies for other positions: all with one tokenizer."""
    _mask: list[NDArray[np.bool_] | None] = field(default_factory=list, repr=False, compare=False)

    def with_item_index(self, item_index: int) -> ResolvedPromptUpdate:
        """Return the same update for another position: what a cached update needs."""
        return self if item_index == self.item_index else replace(self, item_index=item_index)

    def content_ids(self, tokenizer: Tokenizer | None) -> list[int]:
        """Return the content as token ids; tokenized once, and not to be changed."""
        if "content" not in self._ids:
            self._ids["content"] = seq_to_ids(tokenizer, self.content.full)
        return self._ids["content"]

    def target_ids(self, tokenizer: Tokenizer | None) -> list[int] | None:
        """Return the target as token ids; None if it is a place."""
        if isinstance(self.target, PromptIndexTarget):
            return None
        if "target" not in self._ids:
            self._ids["target"] = seq_to_ids(tokenizer, self.target)
        return self._ids["target"]

    def embed_mask(self, tokenizer: Tokenizer | None) -> NDArray[np.bool_] | None:
        """Return which tokens of the content take an embedding; None if all do."""
        if self.content.is_embed is None:
            return None
        if not self._mask:
            full = self.content_ids(tokenizer)
            mask = np.asarray(self.content.is_embed(tokenizer, full), dtype=np.bool_)
            if mask.shape != (len(full),):
                raise ValueError(f"the mask has shape {mask.shape} for {len(full)} tokens")
            mask.flags.writeable = False
            self._mask.append(None if mask.all() else mask)
        return self._mask[0]


class PromptUpdate(ABC):
    """How the items of one modality come into the prompt.

    Args:
        modality: The modality.
        target: Text, token ids or a place; or a function that gives it for an item index.
    """

    def __init__(self, modality: str, target: Target) -> None:
        self.modality = modality
        self.target = target

    @property
    @abstractmethod
    def mode(self) -> Literal["replace", "insert"]:
        """Whether the target goes or stays."""

    @property
    @abstractmethod
    def content(self) -> Content:
        """What is put into the prompt, or a function that gives it for an item index."""

    def resolve(self, item_index: int) -> ResolvedPromptUpdate:
        """Return the update of one item."""
        target = self.target(item_index) if callable(self.target) else self.target
        content = self.content(item_index) if callable(self.content) else self.content
        if not isinstance(content, PromptUpdateDetails):
            content = PromptUpdateDetails(content)
        return ResolvedPromptUpdate(self.modality, item_index, self.mode, target, content)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.modality}>"


class PromptReplacement(PromptUpdate):
    """The target is replaced, once for each item in order.

    Args:
        modality: The modality.
        target: What is replaced.
        replacement: What stands there afterwards.
    """

    def __init__(self, modality: str, target: Target, replacement: Content) -> None:
        super().__init__(modality, target)
        self.replacement = replacement

    @property
    def mode(self) -> Literal["replace", "insert"]:
        """The target goes."""
        return "replace"

    @property
    def content(self) -> Content:
        """The replacement."""
        return self.replacement


class PromptInsertion(PromptUpdate):
    """Content is inserted after the target, which stays; all items may share one target.

    Args:
        modality: The modality.
        target: After what, or where, it is inserted.
        insertion: What is inserted.
    """

    def __init__(self, modality: str, target: Target, insertion: Content) -> None:
        super().__init__(modality, target)
        self.insertion = insertion

    @property
    def mode(self) -> Literal["replace", "insert"]:
        """The target stays."""
        return "insert"

    @property
    def content(self) -> Content:
        """The insertion."""
        return self.insertion


def resolve_updates(
    updates: Sequence[PromptUpdate], item_counts: dict[str, int]
) -> dict[str, list[list[ResolvedPromptUpdate]]]:
    """Return modality -> per item its updates, which are alternatives in order of preference."""
    return {
        modality: [
            [update.resolve(index) for update in updates if update.modality == modality]
            for index in range(count)
        ]
        for modality, count in item_counts.items()
    }


__all__ = [
    "PromptIndexTarget",
    "PromptIndexTargets",
    "PromptInsertion",
    "PromptReplacement",
    "PromptUpdate",
    "PromptUpdateDetails",
    "ResolvedPromptUpdate",
    "Tokenizer",
    "find_ids",
    "resolve_updates",
    "seq_to_ids",
    "seq_to_text",
]
