"""Whisper: sound is read by the encoder alone, and the decoder's prompt is a few tokens.

The prompt, by the model's own tokenizer and generation configuration:

    [<|startofprev|> words] <|startoftranscript|> [<|language|> <|task|>] [<|notimestamps|>]
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

from lazydecode.errors import InvalidRequestError
from lazydecode.inputs import (
    BatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from lazydecode.media.faults import describe
from lazydecode.models.randomness import random_options, set_apart
from lazydecode.models.registry import ModelLoadError
from lazydecode.models.speech import (
    LanguageProbe,
    SpeechRequest,
    TimestampTokens,
    unsupported_language,
)
from lazydecode.models.tokenization import PromptTokenizer
from lazydecode.parse import MultiModalDataItems, ProcessorBatchItems
from lazydecode.processing.context import BaseProcessingInfo
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.processing.outputs import ItemOutput
from lazydecode.processing.processor import BaseMultiModalProcessor

logger = logging.getLogger(__name__)

PROCESSOR_CLASS: Final = "WhisperProcessor"
_STEP_S: Final = 0.02
"""Between two timestamp tokens: two frames of the spectrogram, halved by the encoder."""


class WhisperMultiModalProcessor(BaseMultiModalProcessor):
    """Makes a recording's spectrogram; the prompt has no place for it.

    Args:
        info: What the family says about its media.
        feature_extractor: The model's; it keeps nothing between calls.
        tokenizer: Encodes prompts that come as text.
    """

    per_item = True
    items_in_prompt = False

    def __init__(
        self, info: BaseProcessingInfo, feature_extractor: Any, tokenizer: PromptTokenizer
    ) -> None:
        super().__init__(info)
        self._extract = feature_extractor
        self._tokenizer = tokenizer
        self._random = random_options(SimpleNamespace(feature_extractor=feature_extractor))

    def set_apart(self, inputs: ProcessorInputs) -> ProcessorInputs:
        """Return the inputs with identities of their own, if there is chance in the items."""
        return set_apart(inputs, self._random)

    def _process_missing(
        self, missing: MultiModalDataItems, inputs: ProcessorInputs
    ) -> dict[str, list[ItemOutput]]:
        outputs: dict[str, list[ItemOutput]] = {}
        for modality, items in missing.items():
            if modality != "audio" or not isinstance(items, ProcessorBatchItems):
                raise InvalidRequestError(f"the model takes no {modality}", modality=modality)
            outputs[modality] = [self._item(items.get(at)) for at in range(items.get_count())]
        return outputs

    def _item(self, samples: Any) -> ItemOutput:
        try:
            made = self._extract(
                samples, sampling_rate=self._extract.sampling_rate, return_tensors="pt"
            )
        except (ValueError, RuntimeError) as exc:
            raise InvalidRequestError(f"the model's processor refuses it: {describe(exc)}") from exc
        features = MultiModalFieldElem(made["input_features"][0], BatchedField())
        return ItemOutput(MultiModalKwargsItem({"input_features": features}), ())

    def _finish_prompt(
        self,
        inputs: ProcessorInputs,
        mm_kwargs: Mapping[str, Sequence[MultiModalKwargsItem | None]],
        updates: dict[str, list[Sequence[Any]]],
    ) -> tuple[list[int], dict[str, list[PlaceholderRange]]]:
        prompt = inputs.prompt
        if isinstance(prompt, str):
            prompt = self._tokenizer.encode(prompt, add_special_tokens=False)
        places = {m: [PlaceholderRange(0, 0) for _ in group] for m, group in mm_kwargs.items()}
        return list(prompt), places


class WhisperSpeech:
    """Whisper's prompts and languages.

    Args:
        model: Folder or id, for the generation configuration.
        config: The model's configuration.
        window_s: Longest recording, in seconds: what the feature extractor pads or cuts to.
        tokenizer: Ours.

    Raises:
        ModelLoadError: If the tokenizer lacks a token that every prompt has.
    """

    answers_plainly = True

    def __init__(
        self, model: str, config: Any, window_s: float, tokenizer: PromptTokenizer
    ) -> None:
        self.window_s: float | None = window_s
        self._tokenizer = tokenizer
        generation = _generation_settings(model)
        self._start = self._token("<|startoftranscript|>")
        no_timestamps = generation.get("no_timestamps_token_id") or tokenizer.token_id(
            "<|notimestamps|>"
        )
        self._no_timestamps: int | None = no_timestamps
        self.timestamps: TimestampTokens | None = None
        if no_timestamps is not None:
            self.timestamps = TimestampTokens(
                no_timestamps + 1, _STEP_S, generation.get("max_initial_timestamp_index")
            )
        self._previous = generation.get("prev_sot_token_id") or tokenizer.token_id(
            "<|startofprev|>"
        )
        self._names = _language_names()
        listed: Mapping[str, int] = generation.get("lang_to_id") or {}
        self._languages = {token.strip("<|>"): token_id for token, token_id in listed.items()}
        if not listed:
            known = {code: tokenizer.token_id(f"<|{code}|>") for code in self._names}
            self._languages = {code: found for code, found in known.items() if found is not None}
        if not generation.get("is_multilingual", len(self._languages) > 1):
            self._languages = {}
        self._tasks: dict[str, int] = dict(generation.get("task_to_id") or {})
        for task in ("transcribe", "translate"):
            if self._languages and task not in self._tasks:
                self._tasks[task] = self._token(f"<|{task}|>")
        self._max_previous = int(getattr(config, "max_target_positions", 448)) // 2 - 1

    def _token(self, text: str) -> int:
        found = self._tokenizer.token_id(text)
        if found is None:
            raise ModelLoadError(f"the model's tokenizer has no token {text}")
        return found

    def check(self, request: SpeechRequest) -> None:
        """Check the task and the language; a model for English alone takes no other."""
        if request.task == "translate" and not self._languages:
            raise InvalidRequestError("the model transcribes English; it does not translate")
        if request.language is not None:
            self._code(request.language)

    def _code(self, language: str) -> str:
        """Return the code of a language that the client named by code or name."""
        wanted = language.strip().lower()
        known = self._languages or {"en": 0}
        by_name = {self._names.get(code, code): code for code in known}
        code = wanted if wanted in known else by_name.get(wanted)
        if code is None:
            raise unsupported_language(language, sorted(known))
        return code

    def language_probe(self, request: SpeechRequest) -> LanguageProbe | None:
        """Return the prompt after which the model writes the language, if nobody told it."""
        if request.language is not None or not self._languages:
            return None
        return LanguageProbe([self._start], {i: code for code, i in self._languages.items()})

    def prompt(self, request: SpeechRequest, language: str | None) -> str | list[int]:
        """Return the decoder's prompt, as token ids."""
        ids = [*self._words_before(request.prompt), self._start]
        if self._languages:
            code = language if request.language is None else self._code(request.language)
            assert code is not None
            ids += [self._languages[code], self._tasks[request.task]]
        if not request.timestamps and self._no_timestamps is not None:
            ids.append(self._no_timestamps)
        return ids

    def _words_before(self, text: str) -> list[int]:
        """Return the client's words as if they had been said before; the last ones, if many."""
        if not text.strip() or self._previous is None:
            return []
        plain = self._tokenizer.marker.protect(f" {text.strip()}")
        words = self._tokenizer.encode(plain, add_special_tokens=False)
        return [self._previous, *words[-self._max_previous :]]

    def read(self, text: str) -> tuple[str | None, str]:
        """Return the answer: all of it is the transcript."""
        return None, text.strip()

    def language_name(self, code: str | None) -> str | None:
        """Return the name of a code, or of a name; English is all that some models know."""
        if code is None:
            return None if self._languages else "english"
        return self._names.get(self._code(code))


def _generation_settings(model: str) -> dict[str, Any]:
    """Return the model's generation configuration; empty if it has none."""
    from transformers import GenerationConfig

    try:
        settings: dict[str, Any] = GenerationConfig.from_pretrained(model).to_dict()
    except OSError:
        logger.warning("%s has no generation configuration; its tokenizer's tokens count", model)
        return {}
    return settings


def _language_names() -> dict[str, str]:
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    return dict(LANGUAGES)
