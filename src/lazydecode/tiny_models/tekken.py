"""The tokenizer file of Mistral's library, for families whose prompt that library writes."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

CONTROL_TOKENS = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)
"""Ids 0 to 19, which the library and the Voxtral processor take for granted."""
AUDIO_TOKENS = {24: "[AUDIO]", 25: "[BEGIN_AUDIO]", 34: "[TRANSCRIBE]"}
NUM_CONTROL_TOKENS = 100

_WORDS = ("the", " the", "ing", " a", " is", "what", " this", "audio", " say", "user")


def write_tokenizer(out_dir: Path) -> Any:
    """Write `tekken.json` to `out_dir` and return the tokenizer that transformers makes of it.

    Every byte is a token; a few words and their beginnings follow, so that merges happen.
    """
    from transformers.tokenization_mistral_common import MistralCommonBackend

    pieces = [bytes([value]) for value in range(256)]
    for word in _WORDS:
        encoded = word.encode()
        for end in range(2, len(encoded) + 1):
            if encoded[:end] not in pieces:
                pieces.append(encoded[:end])
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate(pieces)
    ]
    names = dict(enumerate(CONTROL_TOKENS)) | AUDIO_TOKENS
    control = [
        {"rank": rank, "token_str": names.get(rank, f"<SPECIAL_{rank}>"), "is_control": True}
        for rank in range(NUM_CONTROL_TOKENS)
    ]
    spec = {
        "config": {
            "pattern": r"[^\s]+|\s+",
            "num_vocab_tokens": len(vocabulary),
            "default_vocab_size": len(vocabulary) + len(control),
            "default_num_special_tokens": len(control),
            "version": "v7",
        },
        "vocab": vocabulary,
        "special_tokens": control,
        "audio": {
            "sampling_rate": 16000,
            "frame_rate": 12.5,
            "audio_encoding_config": {"num_mel_bins": 128, "hop_length": 160, "window_size": 400},
            "chunk_length_s": 30.0,
        },
    }
    (out_dir / "tekken.json").write_text(json.dumps(spec) + "\n", encoding="utf-8")
    return MistralCommonBackend.from_pretrained(out_dir)
