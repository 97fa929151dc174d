"""The embedded engine against the library's own generate on its own processor's output."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lazydecode.cache import MultiModalReceiverCache
from lazydecode.config import Settings
from lazydecode.engine.factory import create_engine
from lazydecode.engine.generation import Generation, PlacedItem
from lazydecode.engine.model_inputs import joins_across_requests
from lazydecode.engine.protocol import EngineRequest, SamplingParams
from lazydecode.engine.receiver import Receiver
from lazydecode.engine.transformers import TransformersRunner
from lazydecode.errors import EngineError
from lazydecode.inputs import (
    BatchedField,
    FlatField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
    SharedField,
)
from lazydecode.processing.inputs import ProcessorInputs
from tests.engine.library import GREEDY, Case, Model
from tests.models.reference import clip, picture, sound

CASES: Mapping[str, Callable[[], list[Case]]] = {
    "qwen2_5_vl": lambda: [
        Case("what is it", {"image": [picture(84, 56)]}),
        Case("compare the two", {"image": [picture(60, 100, 1), picture(200, 90, 2)]}),
        Case("what moves", {"video": [clip(4, 56, 84)]}),
        Case("which is it", {"image": [picture(64, 64, 3)], "video": [clip(6, 84, 56)]}),
        Case("only words here, no media at all", {}),
    ],
    "qwen2_vl": lambda: [
        Case("what is it", {"image": [picture(84, 56)]}),
        Case("what moves", {"video": [clip(4, 56, 84)]}),
    ],
    "qwen2_audio": lambda: [
        Case("what is said", {"audio": [sound(1.0, 16000)]}),
        Case("who speaks", {"audio": [sound(0.6, 16000, 1), sound(2.5, 16000, 2)]}),
        Case("only words here", {}),
    ],
}


@pytest.fixture(scope="module", params=sorted(CASES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def load(tiny_model: Callable[..., Path]) -> Callable[[str], Model]:
    @cache
    def get(family: str) -> Model:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the library's, while it loads
            return Model(tiny_model(family))

    return get


@pytest.fixture(scope="module")
def qwen(load: Callable[[str], Model]) -> Model:
    return load("qwen2_5_vl")


def outputs(generations: Sequence[Generation]) -> list[list[int]]:
    return [generation.output_token_ids for generation in generations]


# -- the same tokens as the library


def test_alone_it_gives_the_librarys_tokens(load: Callable[[str], Model], family: str) -> None:
    model = load(family)
    for case in CASES[family]():
        generation = model.generation(case)
        model.run([[generation]])
        assert generation.output_token_ids == model.expected(case), case.text
        assert generation.finish_reason == "length"


def test_batched_and_in_turns_it_gives_the_same(load: Callable[[str], Model], family: str) -> None:
    model = load(family)
    cases = CASES[family]()
    expected = [model.expected(case) for case in cases]
    together = [model.generation(case) for case in cases]
    groups = model.runner.group(together)
    assert len(groups) < len(cases) or len(cases) == 1
    model.run(groups)
    assert outputs(together) == expected
    in_turns = [model.generation(case) for case in cases]
    model.run([[generation] for generation in in_turns])
    assert outputs(in_turns) == expected


def test_raw_pixels_were_sent_and_finished_here(qwen: Model) -> None:
    case = CASES["qwen2_5_vl"]()[0]
    item = qwen.input(case)["mm_kwargs"]["image"][0]
    assert item is not None
    assert item["pixel_values"].data.dtype == torch.uint8


def test_the_same_item_from_the_cache_gives_the_same_tokens(qwen: Model) -> None:
    one = qwen.input(CASES["qwen2_5_vl"]()[1])
    receiver = Receiver(MultiModalReceiverCache(capacity_bytes=2**28))
    answers = []
    for kwargs in (one["mm_kwargs"], {"image": [None, None]}):
        request = EngineRequest(
            "r", one["prompt_token_ids"], kwargs, one["mm_hashes"], one["mm_placeholders"], GREEDY
        )
        placed, _ = receiver.receive(request)
        generation = Generation(request, placed, qwen.runner.info)
        qwen.run([[generation]])
        answers.append(generation.output_token_ids)
    assert answers[0] == answers[1]


def test_a_resumed_request_continues_the_same_answer(qwen: Model) -> None:
    case = CASES["qwen2_5_vl"]()[3]
    whole = qwen.generation(case)
    qwen.run([[whole]])
    cut = qwen.generation(case)
    steps = iter(qwen.runner.generate([cut]))
    for _ in range(5):
        next(steps)
    steps.close()  # type: ignore[attr-defined]
    request = EngineRequest("r", cut.token_ids, sampling=GREEDY, num_resumed_tokens=5)
    resumed = Generation(request, cut.items, qwen.runner.info)
    qwen.run([[resumed]])
    assert resumed.output_token_ids == whole.output_token_ids


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "gemma3",  # token_type_ids
        "ernie4_5_vl_moe",  # two kinds of token types, one with borders
        "janus",  # a `generate` that drops logits processors
        "qwen3_omni_moe",  # a model within a model
    ],
)
def test_families_with_ways_of_their_own(tiny_model: Callable[..., Path], family: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's, while it loads
        model = Model(tiny_model(family))
        for case in (Case("what is it", {"image": [picture(84, 56)]}), Case("only words", {})):
            generation = model.generation(case)
            model.run([[generation]])
            assert generation.output_token_ids == model.expected(case), case.text


@pytest.mark.slow
def test_a_video_with_its_sound(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("qwen3_omni_moe")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's, while it loads
        model = Model(path)
        case = Case("what is said", {"video": [clip(6, 84, 56)], "audio": [sound(1.0, 16000)]})
        messages = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "x"}]}]
        (frames, metadata), (samples,) = case.items["video"][0], case.items["audio"]
        theirs = model.reference.processor(
            text=[model.reference.text(messages)],
            videos=[frames],
            video_metadata=[{k: metadata[k] for k in ("fps", "total_num_frames", "duration")}],
            do_sample_frames=False,
            audio=[samples],
            sampling_rate=16000,
            load_audio_from_video=True,
            audio_from_video_indices=[0],
            return_tensors="pt",
        )
        expected = model.library.generate(
            **theirs,
            use_audio_in_video=True,
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert model.frontend.mm_processor is not None
        rendered = model.frontend.render_chat(messages)
        items = model.frontend.info.parse_mm_data(case.items)
        one = model.frontend.mm_processor.apply(
            ProcessorInputs(rendered.text, items, sound_pairs=[(0, 0)])
        )
        assert one["prompt_token_ids"] == theirs["input_ids"][0].tolist()
        generation = model.ready(one)
        model.run([[generation]])
        assert generation.output_token_ids == expected[0, len(theirs["input_ids"][0]) :].tolist()


# -- sampling


def test_seeds_are_each_requests_own(qwen: Model) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=12, ignore_eos=True)
    first, second, third = CASES["qwen2_5_vl"]()[:3]
    alone = qwen.generation(first, sampling)
    qwen.run([[alone]])
    beside = qwen.generation(first, sampling)
    qwen.run([[qwen.generation(second), beside, qwen.generation(third)]])
    assert beside.output_token_ids == alone.output_token_ids
    other = qwen.generation(first, SamplingParams(temperature=0.9, seed=12, max_tokens=12))
    qwen.run([[other]])
    assert other.output_token_ids != alone.output_token_ids


def test_min_tokens_holds_the_end_back_and_the_end_token_is_reported(qwen: Model) -> None:
    case = CASES["qwen2_5_vl"]()[4]
    free = qwen.expected(case)
    stop = free[3]
    at = free.index(stop)
    ends = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(stop,), ignore_eos=True)
    generation = qwen.generation(case, ends)
    qwen.run([[generation]])
    assert generation.output_token_ids == free[: at + 1]
    output = generation.take_output()
    assert output is not None
    assert (output.finish_reason, output.stop_token_id) == ("stop", stop)
    late = qwen.generation(
        case,
        SamplingParams(
            temperature=0.0, max_tokens=12, min_tokens=6, stop_token_ids=(stop,), ignore_eos=True
        ),
    )
    qwen.run([[late]])
    assert stop not in late.output_token_ids[:6]
    assert len(late.output_token_ids) > 6


def test_logprobs_are_the_models_own(qwen: Model) -> None:
    case = CASES["qwen2_5_vl"]()[4]
    generation = qwen.generation(
        case, SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, ignore_eos=True)
    )
    prompt = list(generation.token_ids)
    qwen.run([[generation]])
    output = generation.take_output()
    assert output is not None
    assert output.logprobs is not None
    with torch.no_grad():
        logits = qwen.library(input_ids=torch.tensor([prompt])).logits[0, -1]
    expected = torch.log_softmax(logits, dim=-1)
    first = output.logprobs[0]
    assert first.token_id == generation.output_token_ids[0] == int(expected.argmax())
    assert first.logprob == pytest.approx(float(expected.max()), abs=1e-4)
    best = torch.topk(expected, 2)
    assert [token for token, _ in first.top] == best.indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(best.values.tolist(), abs=1e-4)


# -- ends and failures


def test_an_aborted_member_ends_the_batch_for_itself_alone(qwen: Model) -> None:
    cases = CASES["qwen2_5_vl"]()
    a, b = qwen.generation(cases[0]), qwen.generation(cases[4])
    steps = iter(qwen.runner.generate([a, b]))
    next(steps)
    next(steps)
    a.aborted = True
    assert len(list(steps)) == 9  # the last token ends it
    assert len(a.output_token_ids) == 2
    assert b.output_token_ids == qwen.expected(cases[4])


def test_a_batch_ends_when_nobody_wants_more(qwen: Model) -> None:
    a = qwen.generation(CASES["qwen2_5_vl"]()[0])
    steps = iter(qwen.runner.generate([a]))
    next(steps)
    a.aborted = True
    assert list(steps) == []


def test_items_that_do_not_fit_their_places_fail_and_the_model_goes_on(qwen: Model) -> None:
    case = CASES["qwen2_5_vl"]()[0]
    broken = qwen.generation(case)
    item = broken.items[0]
    grid = item.tensors["image_grid_thw"]
    wrong = MultiModalKwargsItem(
        {**item.tensors, "image_grid_thw": replace(grid, data=grid.data * 2)}  # type: ignore[operator]
    )
    broken.items = (replace(item, tensors=wrong),)
    with pytest.raises((RuntimeError, ValueError, IndexError)) as caught:
        qwen.run([[broken]])
    assert not qwen.runner.is_fatal(caught.value)
    good = qwen.generation(case)
    qwen.run([[good]])
    assert good.output_token_ids == qwen.expected(case)


def test_which_errors_the_process_cannot_survive(qwen: Model) -> None:
    assert qwen.runner.is_fatal(RuntimeError("CUDA error: device-side assert triggered"))
    assert not qwen.runner.is_fatal(torch.OutOfMemoryError("out of memory"))
    no_memory = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
    assert not qwen.runner.is_fatal(no_memory)
    assert qwen.runner.is_out_of_memory(no_memory)
    assert qwen.runner.is_out_of_memory(torch.OutOfMemoryError("out of memory"))
    assert not qwen.runner.is_out_of_memory(RuntimeError("shapes do not match"))


# -- what shares a batch


def placed(field: Any) -> PlacedItem:
    elem = MultiModalFieldElem(torch.zeros(1, 2), field)
    return PlacedItem("image", MultiModalKwargsItem({"x": elem}), PlaceholderRange(0, 1))


def test_only_items_that_join_row_by_row_share_a_batch(qwen: Model) -> None:
    def with_fields(*fields: Any) -> Generation:
        request = EngineRequest("r", [1, 2], sampling=GREEDY)
        return Generation(request, [placed(field) for field in fields], qwen.runner.info)

    assert joins_across_requests(with_fields())
    assert joins_across_requests(with_fields(BatchedField(), FlatField()))
    assert not joins_across_requests(with_fields(BatchedField(), FlatField(dim=1)))
    assert not joins_across_requests(with_fields(SharedField()))
    alone = with_fields(FlatField(dim=1))
    assert [len(g) for g in qwen.runner.group([with_fields(), alone, with_fields()])] == [1, 2]


def test_modalities_are_kept_apart_once_the_model_could_not_mix_them(qwen: Model) -> None:
    cases = CASES["qwen2_5_vl"]()
    image, video, text = (qwen.generation(cases[n]) for n in (0, 2, 4))
    assert len(qwen.runner.group([image, video, text])) == 1
    broken = qwen.generation(cases[0])
    grid = broken.items[0].tensors["image_grid_thw"]
    wrong = {**broken.items[0].tensors, "image_grid_thw": replace(grid, data=grid.data * 2)}  # type: ignore[operator]
    broken.items = (replace(broken.items[0], tensors=MultiModalKwargsItem(wrong)),)
    try:
        with pytest.raises((RuntimeError, ValueError, IndexError)):
            next(iter(qwen.runner.generate([broken, video])))
        assert len(qwen.runner.group([image, video, text])) == 3
    finally:
        qwen.runner._mixes = True


def test_prompts_of_very_different_lengths_do_not_pad_each_other(qwen: Model) -> None:
    def of_length(length: int) -> Generation:
        request = EngineRequest("r", [1] * length, sampling=GREEDY)
        return Generation(request, [], qwen.runner.info)

    groups = qwen.runner.group([of_length(3000), of_length(10), of_length(200), of_length(2500)])
    assert [[len(g.token_ids) for g in group] for group in groups] == [[10, 200], [2500, 3000]]


# -- loading


def test_what_the_model_says_of_itself(qwen: Model, tiny_model: Callable[..., Path]) -> None:
    config = qwen.library.config.get_text_config()
    info = qwen.runner.info
    assert info.model == str(tiny_model("qwen2_5_vl"))
    assert info.max_model_len == config.max_position_embeddings
    assert info.vocab_size == config.vocab_size
    assert info.eos_token_ids
    assert (info.dtype, info.device) == ("float32", "cpu")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is none of auto, float16"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used"),
        ({"device": "abacus"}, "device 'abacus' cannot be used"),
        ({"max_model_len": 10**7}, "max_model_len is 10000000, but the model has"),
    ],
)
def test_options_that_name_nothing_are_refused(
    tiny_model: Callable[..., Path], options: dict[str, Any], why: str
) -> None:
    with pytest.raises(EngineError, match=why):
        TransformersRunner(model=str(tiny_model("qwen2_5_vl")), batching=False, **options)


async def test_the_process_gives_the_librarys_tokens(qwen: Model) -> None:
    settings = Settings(dtype="float32", mm_processor_cache_gb=0.1, log_level="warning")
    engine = create_engine(qwen.frontend.model_id, settings, pixel_plan=qwen.frontend.pixel_plan)
    await engine.start()
    try:
        for case in CASES["qwen2_5_vl"]()[1:4:2]:
            one = qwen.input(case)
            engine.submit(
                EngineRequest(
                    case.text,
                    one["prompt_token_ids"],
                    one["mm_kwargs"],
                    one["mm_hashes"],
                    one["mm_placeholders"],
                    GREEDY,
                )
            )
            tokens = [t async for o in engine.stream(case.text) for t in o.new_token_ids]
            assert tokens == qwen.expected(case)
    finally:
        await engine.close()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Other workers hold the cores; torch's own threads would wait for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- models with an encoder and a decoder


def test_a_decoder_that_reads_the_prompt_beside_an_encoder_of_sound(
    tiny_model: Callable[..., Path],
) -> None:
    runner = TransformersRunner(model=str(tiny_model("whisper")), dtype="float32")
    runner._model.generation_config.decoder_start_token_id = 1
    features = torch.randn(80, 3000, generator=torch.Generator().manual_seed(1))
    prompt = [1, 5, 6]
    expected = transformers.GenerationMixin.generate(
        runner._model,
        input_features=features[None],
        decoder_input_ids=torch.tensor([prompt]),
        generation_config=transformers.GenerationConfig(max_new_tokens=12),
    )[0].tolist()
    elem = MultiModalFieldElem(features, BatchedField())
    sound_item = MultiModalKwargsItem({"input_features": elem})
    items = [PlacedItem("audio", sound_item, PlaceholderRange(0, 0))]
    check_whole_and_resumed(runner, prompt, items, expected[3:])


def test_a_decoder_beside_an_encoder_that_reads_the_prompt(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("florence2")
    runner = TransformersRunner(model=str(path), dtype="float32")
    processor = transformers.AutoProcessor.from_pretrained(path)
    inputs = processor(text="what is it", images=picture(84, 56), return_tensors="pt")
    expected = runner._model.generate(
        **inputs, generation_config=transformers.GenerationConfig(max_new_tokens=12)
    )[0].tolist()
    elem = MultiModalFieldElem(inputs["pixel_values"][0], BatchedField())
    image_item = MultiModalKwargsItem({"pixel_values": elem})
    items = [PlacedItem("image", image_item, PlaceholderRange(0, 1))]
    check_whole_and_resumed(runner, inputs["input_ids"][0].tolist(), items, expected[1:])


def check_whole_and_resumed(
    runner: TransformersRunner, prompt: list[int], items: list[PlacedItem], expected: list[int]
) -> None:
    for resumed in (0, 4):
        request = EngineRequest(
            "r", prompt + expected[:resumed], sampling=GREEDY, num_resumed_tokens=resumed
        )
        generation = Generation(request, items, runner.info)
        for _ in runner.generate([generation]):
            pass
        assert generation.output_token_ids == expected
