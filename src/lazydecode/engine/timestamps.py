"""Which tokens may come next where a model writes times between its words.

Source: the rules of Whisper's own decoding (Radford et al., "Robust Speech Recognition via
Large-Scale Weak Supervision", 2022), as `WhisperTimeStampLogitsProcessor` of Transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lazydecode.engine.protocol import TimestampRule


def apply_timestamp_rule(
    logits: torch.Tensor, output_ids: Sequence[int], rule: TimestampRule, end_id: int
) -> None:
    """Forbid, in place, what may not follow `output_ids`.

    Times come in pairs (the end of a segment, the beginning of the next) and never go back; the
    output begins with one; and if a time is likelier than any single word, one comes.

    Args:
        logits: Shape (vocabulary,), float32.
        output_ids: What was generated so far.
        rule: Which tokens are times.
        end_id: The token that ends the output. Words are below it, times above.
    """
    first = rule.first
    forbidden = -torch.inf
    logits[first - 1] = forbidden  # "no times"
    was_time = bool(output_ids) and output_ids[-1] >= first
    was_time_before = len(output_ids) < 2 or output_ids[-2] >= first
    if was_time and was_time_before:
        logits[first:] = forbidden
    elif was_time:
        logits[:end_id] = forbidden
    last = next((token for token in reversed(output_ids) if token >= first), None)
    if last is not None:
        # The same time again only as the second one of a pair.
        logits[first : last if was_time and not was_time_before else last + 1] = forbidden
    if not output_ids:
        logits[:first] = forbidden
        if rule.max_initial is not None:
            logits[first + rule.max_initial + 1 :] = forbidden
    logprobs = torch.log_softmax(logits, dim=-1)
    if logprobs[first:].logsumexp(dim=-1) > logprobs[:first].max():
        logits[:first] = forbidden
