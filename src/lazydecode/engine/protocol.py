"""What an engine takes, what it gives, and what every engine must do.

An engine holds the receiver cache that mirrors the front end's sender cache. The mirror stays
equal because `Engine.submit` is called in the order in which the sender cache was updated (on
the ordered worker, right after phase 2), and because the engine applies every submitted
request's cache updates in that order, whatever becomes of the request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import msgspec

from lazydecode.errors import ValidationError
from lazydecode.inputs import MultiModalKwargsItem, PlaceholderRange

FinishReason = Literal["stop", "length", "abort"]

MAX_LOGPROBS = 20
"""Most alternatives per token that may be asked for, as in OpenAI's API."""
_END_OF_INT64 = 2**63
"""Integers have to fit into a message to the engine, and into a tensor there."""


class TimestampRule(msgspec.Struct, frozen=True, array_like=True):
    """Times are written between the words, as tokens of their own."""

    first: int
    """Id of the token of 0 s; later times follow it, and the one before it means "no times"."""
    max_initial: int | None = None
    """Largest step that the first time may have; None: any."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one request are chosen and when they end.

    Raises:
        ValidationError: If a value is out of range; `parameter` names it.
    """

    max_tokens: int | None = None
    """Most tokens to generate; None: as many as the context still takes."""
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1 keeps all."""
    top_k: int = 0
    """Keep this many of the most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the most likely one."""
    repetition_penalty: float = 1.0
    """Over prompt and output, as in Transformers; 1 is none."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that was generated before."""
    frequency_penalty: float = 0.0
    """Subtracted once per earlier occurrence in what was generated."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these token ids, in [-100, 100]."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever runs beside the request."""
    stop_token_ids: tuple[int, ...] = ()
    """End after any of these, as after the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""
    n: int = 1
    """Always 1: the front end submits one request per choice."""
    logprobs: int | None = None
    """Alternatives to report per token, 0 for the chosen one alone; None reports nothing."""
    timestamps: TimestampRule | None = None
    """Have a speech model write times; None: it is not held to their rules."""

    def __post_init__(self) -> None:
        end = _END_OF_INT64
        limit = self.max_tokens
        self._check("max_tokens", limit is None or 1 <= limit < end, "at least 1, in 64 bits")
        self._check("min_tokens", 0 <= self.min_tokens < end, "at least 0, in 64 bits")
        self._check("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100")
        self._check("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        self._check("top_k", -1 <= self.top_k < end, "at least -1, in 64 bits")
        self._check("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1")
        self._check("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "in (0, 100]")
        self._check("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2")
        self._check("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2")
        for token, bias in self.logit_bias.items():
            self._check("logit_bias", 0 <= token < end, "of token ids")
            self._check("logit_bias", -100.0 <= bias <= 100.0, "between -100 and 100")
        for token in self.stop_token_ids:
            self._check("stop_token_ids", 0 <= token < end, "token ids")
        self._check("seed", self.seed is None or -end <= self.seed < end, "a 64-bit integer")
        self._check("n", self.n == 1, "1")
        self._check(
            "logprobs",
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            f"between 0 and {MAX_LOGPROBS}",
        )

    def _check(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:  # NaN holds nothing, so it is refused as well
            value = getattr(self, name)
            raise ValidationError(
                f"{name} must be {allowed}, got {value!r}", parameter=name, value=value
            )


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt with its items, as phase 2 hands it over.

    A request that is submitted again after the engine died may carry what was generated before
    as the end of `prompt_token_ids`; `num_resumed_tokens` then says how many, so that limits,
    penalties and seeds go on as if nothing had happened.
    """

    request_id: str
    """Unique among the requests that run."""
    prompt_token_ids: list[int]
    """Placeholders already expanded."""
    mm_kwargs: dict[str, list[MultiModalKwargsItem | None]] = field(default_factory=dict)
    """Modality -> per item its tensors, or None when the receiver cache holds them."""
    mm_hashes: dict[str, list[str]] = field(default_factory=dict)
    mm_placeholders: dict[str, list[PlaceholderRange]] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    num_resumed_tokens: int = 0
    cache_items: bool = True
    """False: the items pass the receiver cache by (the front end did not use its own either)."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one generated token, before temperature and penalties."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []
    """The most likely tokens and theirs, best first."""


class EngineOutput(msgspec.Struct, frozen=True, array_like=True):
    """What became of a request since the last output.

    The first output of a stream has no tokens: it says that the engine has accepted the request
    and holds all its items, so that the front end may let go of the media.
    """

    request_id: str
    new_token_ids: list[int] = []
    """Includes the token that ended the sequence."""
    finish_reason: FinishReason | None = None
    """Set in the last output of a stream."""
    stop_token_id: int | None = None
    """The token that ended the sequence, with reason `stop`."""
    num_cached_items: int = 0
    """Items that came out of the receiver cache; set in the first output."""
    logprobs: list[TokenLogprob] | None = None
    """Parallel to `new_token_ids`, if asked for."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a started engine says about its model."""

    model: str
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; None is no limit that the engine knows."""
    vocab_size: int | None = None
    """Token ids are below this."""
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    """Torch's name of the model's dtype."""
    device: str = "cpu"
    default_sampling: dict[str, float] = {}
    """`SamplingParams` fields that the model's generation config recommends."""


@runtime_checkable
class Engine(Protocol):
    """What the front end needs of an engine; `EngineClient` and `NullEngine` are ones."""

    @property
    def info(self) -> EngineInfo | None:
        """The model that runs; None before `start`."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether requests are being served now; False while a dead process is replaced."""
        ...

    @property
    def pid(self) -> int | None:
        """Process id of the engine, None if there is none now."""
        ...

    async def start(self) -> None:
        """Return once the model is loaded.

        Raises:
            EngineError: If it cannot be; the message says why.
        """
        ...

    async def close(self) -> None:
        """End the engine within seconds; running streams fail with EngineDeadError."""
        ...

    def submit(self, request: EngineRequest) -> None:
        """Hand over a request, in the order of the sender cache's updates; never blocks.

        Every submit must be followed by `stream`, or by `abort` if nobody wants the answer.

        Raises:
            ValueError: If a request with this id is running.
            EngineDeadError: If the engine is closed or cannot be started again.
        """
        ...

    def stream(self, request_id: str) -> AsyncIterator[EngineOutput]:
        """Yield a submitted request's outputs as they come; once per request.

        A consumer that stops early (cancelled, or the iterator closed) aborts the request.

        Raises:
            CacheMissError: Before any output, if the receiver cache lacks items that were not
                sent; it names all of them.
            ValidationError: If the prompt does not fit or holds unknown token ids.
            EngineDeadError: If the engine process went away. Retryable.
            EngineError: If the model failed on this request.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Stop generating for this request; unknown ids are ignored. Thread-safe."""
        ...

    async def cache_snapshot_async(self) -> list[str]:
        """Return the receiver cache's hashes in eviction order, after all earlier submits."""
        ...

    def clear_cache(self) -> None:
        """Empty the receiver cache, in order with the submits around it. Thread-safe."""
        ...

    def invalidate_cache(self, mm_hashes: Sequence[str]) -> None:
        """Drop these from the receiver cache, in order with the submits around it. Thread-safe.

        To be called with `sender_cache.invalidate(mm_hashes)`, in one job of the ordered worker:
        of what another request may have sent in between, both sides then forget the same.
        """
        ...

    def on_restart(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever the engine process was lost, before its streams fail.

        It runs on a thread of the engine's and must not block: schedule on the ordered worker
        `sender_cache.clear_cache(); engine.clear_cache()`, which puts the same point in the
        order of both caches, whatever was submitted in between.
        """
        ...


def resolve_max_tokens(
    num_prompt_tokens: int, sampling: SamplingParams, max_model_len: int | None
) -> int:
    """Return how many tokens may be generated, the ones resumed included in neither argument.

    Raises:
        ValidationError: If the prompt, or the prompt with `max_tokens`, is longer than the
            context.
    """
    if max_model_len is None:
        return 2**31 - 1 if sampling.max_tokens is None else sampling.max_tokens
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ValidationError(
            f"the prompt has {num_prompt_tokens} tokens, but the model's context is "
            f"{max_model_len} tokens and one must be left for the answer; shorten the prompt or "
            "send fewer or smaller media",
            parameter="messages",
            value=num_prompt_tokens,
        )
    if sampling.max_tokens is None:
        return room
    if sampling.max_tokens > room:
        raise ValidationError(
            f"max_tokens is {sampling.max_tokens}, but the prompt has {num_prompt_tokens} tokens "
            f"and the model's context is {max_model_len} tokens, which leaves {room}",
            parameter="max_tokens",
            value=sampling.max_tokens,
        )
    return sampling.max_tokens


def recommended_sampling(config: Mapping[str, object]) -> dict[str, float]:
    """Pick from a generation config what `SamplingParams` has a field for.

    A stated `do_sample: false` means greedy, that is, temperature 0.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found: dict[str, float] = {}
    for name in names:
        value = config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = value
    if config.get("do_sample") is False:
        for name in ("temperature", "top_p", "top_k", "min_p"):
            found.pop(name, None)
        found["temperature"] = 0.0
    return found
