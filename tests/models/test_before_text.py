"""Classes that write the ids of their one item first, whatever the text says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.models.conftest import LoadFrontend
from tests.models.reference import Reference, picture

TEXTS = ("What is it?", "  a\n\nb |SPEAKER", "")


@pytest.mark.parametrize("family", ["fuyu", "blip_2"])
def test_another_text_behind_an_item_of_one_size_does_not_run_the_class(
    family: str,
    frontend: LoadFrontend,
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = frontend(family)
    assert model.mm_processor is not None
    own = model.mm_processor.family
    assert own.proof.mode == "whole_request"
    assert own.proof.before_text is not None
    reference = Reference(str(tiny_model(family, weights=False)))
    image = picture(64, 90)
    item = own.process("image", image).text
    runs: list[str] = []
    run_text = own.items.run_text

    def counted(text: str, *args: Any, **options: Any) -> Any:
        runs.append(text)
        return run_text(text, *args, **options)

    monkeypatch.setattr(own.items, "run_text", counted)
    for text in TEXTS:
        messages = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
        ]
        built = own.build_prompt(model.render_chat(messages).text, {"image": [item]})
        theirs = reference.ids(reference.text(messages), {"image": [image]})
        assert built.token_ids == theirs
        (place,) = built.placeholders["image"]
        embeds = own.expander.embed_ids["image"]
        taken = theirs[place.offset : place.offset + place.length]
        assert sum(i in embeds for i in taken) == sum(i in embeds for i in theirs)
    assert len(runs) == 1
