"""Kimi K2.5's fused preprocessing: the same bits, one thread inside, and life without numba."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lazydecode.config import Settings
from lazydecode.models.exclusion import lock_for
from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.loading import load_model_frontend
from tests.builders import make_jpeg
from tests.builders_video import make_mp4
from tests.models.reference import clip, picture
from tests.models.test_generic import inputs, processor, refs, user

LoadKimi = Callable[..., ModelFrontend]


@pytest.fixture(scope="module")
def load_kimi(tiny_model: Callable[..., Path]) -> LoadKimi:
    def load(*, fused: bool) -> ModelFrontend:
        model = str(tiny_model("kimi_k25", weights=False))
        return load_model_frontend(model, Settings(fused_preprocessing=fused, raw_pixels=False))

    return load


@pytest.fixture(scope="module")
def plain(load_kimi: LoadKimi) -> ModelFrontend:
    return load_kimi(fused=False)


@pytest.fixture(scope="module")
def fast(load_kimi: LoadKimi) -> ModelFrontend:
    return load_kimi(fused=True)


def same(plain: ModelFrontend, fast: ModelFrontend, modality: str, item: Any, options: Any) -> bool:
    usual, ours = (
        processor(model).family.process(modality, item, options) for model in (plain, fast)
    )
    assert usual.text == ours.text
    assert usual.kwargs.keys() == ours.kwargs.keys()
    return all(
        torch.equal(torch.as_tensor(elem.data), torch.as_tensor(ours.kwargs[name].data))
        for name, elem in usual.kwargs.items()
    )


OPTIONS = [
    {},
    {"do_resize": False, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.9, 0.4, 0.7]},
    {"do_rescale": False},
    {"do_normalize": False},
]


@pytest.mark.parametrize("size", [(1, 1), (28, 28), (13, 900), (333, 77), (1000, 701)], ids=str)
def test_pictures_of_any_size_come_out_the_same(
    plain: ModelFrontend, fast: ModelFrontend, size: tuple[int, int]
) -> None:
    assert same(plain, fast, "image", picture(*size), None)


@pytest.mark.parametrize("shape", [(1, 28, 28), (4, 50, 90), (9, 112, 84), (6, 333, 20)], ids=str)
def test_videos_of_any_shape_come_out_the_same(
    plain: ModelFrontend, fast: ModelFrontend, shape: tuple[int, int, int]
) -> None:
    assert same(plain, fast, "video", clip(*shape), None)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_mean_the_same(
    plain: ModelFrontend, fast: ModelFrontend, options: dict[str, Any]
) -> None:
    assert same(plain, fast, "image", picture(56, 84), options)


def test_it_lets_one_thread_in_for_all_models_that_have_it(
    plain: ModelFrontend, fast: ModelFrontend, load_kimi: LoadKimi
) -> None:
    assert processor(plain).reentrant and not processor(fast).reentrant
    lock = processor(fast).family.call.lock
    assert processor(load_kimi(fused=True)).family.call.lock is lock
    assert lock_for(fast.processor, reentrant=False) is lock


def test_every_entry_holds_the_lock(fast: ModelFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processing, header-only rendering, and the class's own search for placeholders, if asked."""
    family = processor(fast).family
    lock: Any = family.call.lock
    entries: list[str] = []
    for name in ("get_text_with_replacements", "_process_images", "_process_videos"):
        original = getattr(family.call.processor, name)

        def watched(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            assert lock._is_owned()
            entries.append(_name)
            return _original(*args, **kwargs)

        monkeypatch.setattr(family.call.processor, name, watched)
    prompt = fast.render_chat(user({"type": "image"}, {"type": "video"}))
    media = refs(fast, image=[make_jpeg((70, 91))], video=[make_mp4(6, 3, (56, 84))])
    assert processor(fast).render_from_headers(inputs(fast, prompt, media)) is not None
    assert entries.count("_process_images") == entries.count("_process_videos") == 1
    again = fast.render_chat(
        user({"type": "image"}, {"type": "video"}, {"type": "text", "text": "x"})
    )
    processor(fast).apply(inputs(fast, again, media))
    assert entries.count("_process_images") == entries.count("_process_videos") == 2


def test_without_numba_a_line_says_so_and_all_goes_on(
    load_kimi: LoadKimi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "numba" else find(n, *a)
    )
    with caplog.at_level(logging.WARNING, logger="lazydecode"):
        model = load_kimi(fused=True)
    assert [r.message for r in caplog.records if "numba" in r.message] == [
        "fused preprocessing is off: it needs numba (pip install lazydecode[numba])"
    ]
    assert processor(model).reentrant
    assert processor(model).family.process("image", picture(56, 56)).kwargs
