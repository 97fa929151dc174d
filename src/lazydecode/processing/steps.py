"""The steps of processing that model families replace, with defaults on one HF processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lazydecode.errors import PlaceholderMismatchError
from lazydecode.inputs import MultiModalKwargsItem, PlaceholderRange
from lazydecode.parse import MultiModalDataItems
from lazydecode.processing.context import BaseProcessingInfo
from lazydecode.processing.failures import check_count
from lazydecode.processing.fields import MultiModalFieldConfig, own_storage, split_into_items
from lazydecode.processing.inputs import ProcessorInputs
from lazydecode.processing.outputs import ItemOutput
from lazydecode.processing.placement import (
    apply_updates_to_ids,
    apply_updates_to_text,
    find_placeholders,
)
from lazydecode.processing.prompt_updates import PromptUpdate, resolve_updates


class ProcessingSteps:
    """What a family replaces: two whole steps, or the hooks that their defaults call.

    A family either replaces `_process_missing` and `_finish_prompt`, or gives an HF processor
    and replaces `_get_mm_fields_config` and `_get_prompt_updates` (and what else differs).
    """

    info: BaseProcessingInfo

    # -- identity

    def set_apart(self, inputs: ProcessorInputs) -> ProcessorInputs:
        """Return the inputs with identities of their own for items whose results differ from run
        to run: leaving the cache out would not do, as an engine's cache goes by the identity."""
        return inputs

    # -- items

    def process_single(self, inputs: ProcessorInputs) -> ItemOutput:
        """Return the result of the one item of `inputs`; only for processors that are `per_item`.

        Whoever calls it holds what the model's processor needs (see `process_guard`).
        """
        ((output,),) = self._process_missing(inputs.mm_data_items, inputs).values()
        return output

    def _process_missing(
        self, missing: MultiModalDataItems, inputs: ProcessorInputs
    ) -> dict[str, list[ItemOutput]]:
        """Return modality -> the result of each item of `missing`, which are decoded.

        Must not depend on the request's other items or its prompt: results are cached. By
        default one call of the model's processor for all, split by `_get_mm_fields_config`.
        `missing` may be empty.
        """
        options = inputs.hf_processor_mm_kwargs
        hf_data, hf_kwargs, passthrough = self._get_hf_mm_inputs(missing, options)
        hf_outputs = dict(self._call_hf_processor(hf_data, hf_kwargs)) if hf_data else {}
        hf_outputs.update(passthrough)
        kwargs = split_into_items(hf_outputs, self._get_mm_fields_config(hf_outputs, options))
        updates = resolve_updates(
            self._get_prompt_updates(missing, options, kwargs), missing.get_all_counts()
        )
        outputs: dict[str, list[ItemOutput]] = {}
        for modality, count in missing.get_all_counts().items():
            items = kwargs.get(modality, [])
            if count == 0:
                outputs[modality] = []
                continue
            check_count("tensors", modality, len(items), count)
            outputs[modality] = [
                ItemOutput(own_storage(item) if count > 1 else item, item_updates)
                for item, item_updates in zip(items, updates[modality], strict=True)
            ]
        return outputs

    def _get_hf_mm_inputs(
        self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return what goes into the HF processor, its options, and what passes it by."""
        data: dict[str, Any] = {}
        passthrough: dict[str, Any] = {}
        for items in mm_items.values():
            if items.get_count():
                data.update(items.get_processor_data())
                passthrough.update(items.get_passthrough_data())
        if "audios" in data:
            data["audio"] = data.pop("audios")
        return data, dict(hf_kwargs), passthrough

    def _call_hf_processor(
        self, hf_data: Mapping[str, Any], hf_kwargs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Run the model's processor; only called when there is data."""
        processor = self.info.ctx.hf_processor
        if processor is None:
            raise TypeError(f"{type(self).__name__} has no HF processor to call")
        outputs: Mapping[str, Any] = processor(**hf_data, **hf_kwargs, return_tensors="pt")
        return outputs

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, Any]
    ) -> Mapping[str, MultiModalFieldConfig]:
        """Return output name -> how it splits into items; what has no rule is left out."""
        return {}

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, Any],
        out_mm_kwargs: Mapping[str, Sequence[MultiModalKwargsItem]],
    ) -> Sequence[PromptUpdate]:
        """Return how the items come into the prompt; `mm_items` may be any part of a request."""
        return ()

    # -- the prompt

    def _finish_prompt(
        self,
        inputs: ProcessorInputs,
        mm_kwargs: Mapping[str, Sequence[MultiModalKwargsItem | None]],
        updates: dict[str, list[Sequence[Any]]],
    ) -> tuple[list[int], dict[str, list[PlaceholderRange]]]:
        """Return the prompt's token ids with all items in it, and where they are.

        Encoded media is gone by now. By default updates are matched by token ids, and by text
        where the text's tokenization hides a target.
        """
        tokenizer = self.info.ctx.tokenizer
        prompt = inputs.prompt
        if not isinstance(prompt, str):
            return apply_updates_to_ids(prompt, updates, tokenizer)
        if tokenizer is None:
            raise TypeError("a text prompt needs a tokenizer")
        try:
            return apply_updates_to_ids(tokenizer.encode(prompt), updates, tokenizer)
        except PlaceholderMismatchError:
            text = apply_updates_to_text(prompt, updates, tokenizer)
            prompt_ids = list(tokenizer.encode(text))
            return prompt_ids, find_placeholders(prompt_ids, updates, tokenizer)
