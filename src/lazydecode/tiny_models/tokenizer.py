"""Tokenizers of tiny models: byte-level BPE trained here, then the family's control tokens."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from lazydecode.tiny_models import corpus

if TYPE_CHECKING:
    from lazydecode.tiny_models.records import Family

NUM_TEXT_TOKENS = 640
"""Byte tokens and merges together; control tokens follow."""

# Contractions, letter runs with one leading other character, single digits, punctuation with
# its newlines, newline runs, spaces: the split that GPT-4's and Qwen2's tokenizers use.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_BYTES = tuple(f"<0x{value:02X}>" for value in range(256))
"""How a SentencePiece vocabulary spells bytes."""


@functools.cache
def trained_bpe() -> str:
    """Train the byte-level BPE that all families share; return its JSON.

    Training counts pairs and breaks ties by token id, so the result depends on the text alone.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TEXT_TOKENS,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    # Twice, so that each word of the text reaches the minimum frequency.
    tokenizer.train_from_iterator([corpus.TEXT, corpus.TEXT], trainer)
    return str(tokenizer.to_str())


@functools.cache
def trained_sentencepiece(pieces: tuple[str, ...]) -> str:
    """Train the BPE of families with a SentencePiece vocabulary; return its JSON.

    A space is written `\u2581`, and one stands before every text. Characters that are not in the
    vocabulary are spelled as bytes.

    Args:
        pieces: Entries that are one token wherever a text spells them (user-defined pieces).
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token=_BYTES[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    letters = {"\u2581", *"".join(pieces)}
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TEXT_TOKENS,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(letters),
        special_tokens=list(_BYTES),
    )
    tokenizer.train_from_iterator([corpus.TEXT, corpus.TEXT], trainer)
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = []  # bytes are no control tokens
    vocabulary: dict[str, int] = spec["model"]["vocab"]
    ends = [(piece[:at], piece[at]) for piece in pieces for at in range(1, len(piece))]
    for pair in ends:
        vocabulary.setdefault("".join(pair), len(vocabulary))
    spec["model"]["merges"] = [list(pair) for pair in dict.fromkeys(ends)] + spec["model"]["merges"]
    return json.dumps(spec)


def control_tokens(family: Family) -> list[str]:
    """Return the family's control tokens in the order of their ids, each once."""
    wanted = [family.pad, family.eos, family.bos or family.eos]
    wanted += [*family.turns.tokens, *family.tokens, *family.named_tokens.values()]
    return list(dict.fromkeys(wanted))


def make_tokenizer(family: Family, *, template: str | None = None) -> Any:
    """Return the family's `PreTrainedTokenizerFast`.

    Args:
        family: Whose control tokens to add.
        template: Chat template to keep on the tokenizer, for processors that hold none.
    """
    from tokenizers import AddedToken, Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    spec = json.loads(trained_sentencepiece(family.pieces) if family.pieces else trained_bpe())
    if "<unk>" in family.tokens:
        # Some tokenizer classes rebuild the BPE model and look the token up in it.
        spec["model"]["vocab"]["<unk>"] = len(spec["model"]["vocab"])
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in control_tokens(family)]
    )
    if family.bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A",
            pair=f"{family.bos} $A $B",
            special_tokens=[(family.bos, tokenizer.token_to_id(family.bos))],
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=family.bos,
        eos_token=family.eos,
        pad_token=family.pad,
        extra_special_tokens=dict(family.named_tokens),
        model_max_length=131072,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    if template is not None:
        made.chat_template = template
    return made
