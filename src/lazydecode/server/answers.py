"""OpenAI's answer objects, whole and in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lazydecode.engine.protocol import TokenLogprob
from lazydecode.server.generation import Delta

Decode = Callable[[list[int]], str]
DONE = b"data: [DONE]\n\n"


def usage(num_prompt_tokens: int, num_answer_tokens: int) -> dict[str, int]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_answer_tokens,
        "total_tokens": num_prompt_tokens + num_answer_tokens,
    }


def completion(
    answer_id: str,
    created: int,
    model: str,
    text: str,
    finish_reason: str,
    *,
    logprobs: Sequence[TokenLogprob] | None,
    usage: dict[str, int],
    decode: Decode,
) -> dict[str, Any]:
    """A whole answer with one choice."""
    return {
        "id": answer_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None if logprobs is None else logprobs_object(logprobs, decode),
                "finish_reason": finish_reason,
            }
        ],
        "usage": usage,
    }


class ChunkWriter:
    """Server-sent events of one streamed answer.

    Args:
        answer_id: Id that all chunks bear.
        created: Unix time.
        model: Name that all chunks bear.
        wants_usage: Whether a last chunk with the usage follows; the others then say null.
        wants_logprobs: Whether choices hold log-probabilities.
        decode: Token ids to text, for single tokens.
    """

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        *,
        wants_usage: bool,
        wants_logprobs: bool,
        decode: Decode,
    ) -> None:
        self._base: dict[str, Any] = {
            "id": answer_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }
        self._wants_usage = wants_usage
        self._wants_logprobs = wants_logprobs
        self._decode = decode

    def first(self) -> bytes:
        """The chunk that names the role."""
        return self._choice({"role": "assistant", "content": ""}, None, None)

    def delta(self, delta: Delta) -> bytes:
        """A piece of text, and with the last one the reason of the end."""
        logprobs = None
        if self._wants_logprobs:
            logprobs = logprobs_object(delta.logprobs, self._decode)
        content = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
        return self._choice(content, logprobs, delta.finish_reason)

    def last(self, usage: dict[str, int] | None, extra: dict[str, Any]) -> bytes:
        """The chunk without choices that closes the stream with the usage, if asked for."""
        return _event({**self._base, "choices": [], "usage": usage, **extra})

    def _choice(self, delta: Any, logprobs: Any, finish_reason: str | None) -> bytes:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        chunk = {**self._base, "choices": [choice]}
        if self._wants_usage:
            chunk["usage"] = None
        return _event(chunk)


def logprobs_object(logprobs: Sequence[TokenLogprob], decode: Decode) -> dict[str, Any]:
    """OpenAI's form of log-probabilities."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = decode([token_id])
        # JSON has no infinity; OpenAI writes -9999 for a token that cannot come.
        return {
            "token": text,
            "logprob": max(logprob, -9999.0),
            "bytes": list(text.encode()),
        }

    return {
        "content": [
            {
                **entry(token.token_id, token.logprob),
                "top_logprobs": [entry(token_id, value) for token_id, value in token.top],
            }
            for token in logprobs
        ],
        "refusal": None,
    }


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
