"""Imports that wait for their first use."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lazydecode.later import Later
from lazydecode.server.deferring import deferred

MODULE = "lazydecode_test_heavy"


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that can be imported, and leaves a file for each time that it is run."""
    folder = tmp_path / MODULE
    folder.mkdir()
    code = f"with open({str(tmp_path / 'runs')!r}, 'a') as file:\n    file.write('x')\n"
    (folder / "__init__.py").write_text(
        f"{code}VALUE = 7\nTABLE = {{'a': 1}}\nclass Base:\n    pass\n"
        "def solve(a, *, b=1):\n    return (a, b)\n"
    )
    (folder / "part.py").write_text("from . import VALUE\nTWICE = 2 * VALUE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in (MODULE, f"{MODULE}.part"):
        sys.modules.pop(name, None)


def runs(tmp_path: Path) -> int:
    path = tmp_path / "runs"
    return len(path.read_text()) if path.exists() else 0


def test_a_function_is_imported_without_running_its_module_and_a_call_runs_it(
    tmp_path: Path,
) -> None:
    names: dict[str, object] = {}
    with deferred(MODULE, "solve"):
        exec(f"from {MODULE} import solve", names)
        assert inspect.getmodule(runs) is sys.modules[__name__]  # looks through all modules
    assert MODULE not in sys.modules
    assert runs(tmp_path) == 0
    solve = names["solve"]
    assert callable(solve)
    assert solve(3, b=4) == (3, 4)
    assert solve(5) == (5, 1)
    assert runs(tmp_path) == 1
    assert sys.modules[MODULE].VALUE == 7


def test_whoever_asks_for_more_gets_the_module_itself(tmp_path: Path) -> None:
    names: dict[str, object] = {}
    with deferred(MODULE, "solve"):
        exec(f"from {MODULE} import solve, VALUE", names)
        assert names["VALUE"] == 7
        exec(f"from {MODULE}.part import TWICE", names)
        assert names["TWICE"] == 14
        real = sys.modules[MODULE]
    assert sys.modules[MODULE] is real
    assert real.__file__ == str(tmp_path / MODULE / "__init__.py")
    assert runs(tmp_path) == 1


def test_its_parts_can_be_imported_inside(tmp_path: Path) -> None:
    names: dict[str, object] = {}
    with deferred(MODULE, "solve"):
        exec(f"import {MODULE}.part", names)
    assert sys.modules[f"{MODULE}.part"].TWICE == 14
    assert runs(tmp_path) == 1


def test_a_module_that_was_run_already_stays(tmp_path: Path) -> None:
    exec(f"import {MODULE}", {})
    real = sys.modules[MODULE]
    with deferred(MODULE, "solve"):
        assert sys.modules[MODULE] is real
    assert sys.modules[MODULE] is real
    assert runs(tmp_path) == 1


def test_a_module_that_is_not_there_stays_so() -> None:
    for missing in ("lazydecode_test_missing", "lazydecode_test_missing.part", f"{MODULE}.none"):
        with deferred(missing, "solve"), pytest.raises(ModuleNotFoundError):
            exec(f"from {missing} import solve", {})


def test_a_class_and_a_mapping_are_looked_into_when_they_are_used(tmp_path: Path) -> None:
    names: dict[str, object] = {}
    with deferred(MODULE, "Base", "TABLE"):
        exec(f"from {MODULE} import Base, TABLE", names)
    base, table = names["Base"], names["TABLE"]
    assert isinstance(base, Later)
    assert isinstance(table, Later)
    assert isinstance(7, (int, base))  # the first one that fits
    assert runs(tmp_path) == 0
    assert not isinstance("7", (int, base))
    assert runs(tmp_path) == 1
    real = sys.modules[MODULE]
    assert isinstance(real.Base(), base)
    assert issubclass(real.Base, base)
    assert type(base()) is real.Base
    exec("class Child(Base): pass", names)
    child = names["Child"]
    assert isinstance(child, type)
    assert child.__bases__ == (real.Base,)
    assert "a" in table
    assert (table["a"], len(table), list(table), list(table.keys())) == (1, 1, ["a"], ["a"])
    assert table
    assert not hasattr(table, "__file__")
    assert runs(tmp_path) == 1


def run_fresh(code: str) -> None:
    """Run code in an interpreter that has imported nothing."""
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", code], check=True)


def test_the_compiler_is_imported_by_who_compiles_and_knows_what_it_was_told() -> None:
    run_fresh(
        """
import sys, torch
from lazydecode.server.deferring import defer_compiler
defer_compiler()

def loaded():
    return "torch._dynamo.eval_frame" in sys.modules

calls = []

@torch.compiler.disable
def alone(x):
    calls.append(torch.compiler.is_compiling())
    return x + 1

@torch.compiler.disable(recursive=False)
def also_alone(x):
    calls.append(torch.compiler.is_compiling())
    return x * 2

@torch.compiler.allow_in_graph
def whole(x):
    return x - 1

import torchvision
from torchvision.transforms.v2 import functional
one = torch.ones(2)
assert alone(one).tolist() == [2, 2] and alone.__name__ == "alone"
assert also_alone(one).tolist() == [2, 2] and whole(one).tolist() == [0, 0]
meta = torch.empty((3, 40, 30), dtype=torch.uint8, device="meta")
bicubic = functional.InterpolationMode.BICUBIC
assert functional.resize(meta, [20, 10], interpolation=bicubic).shape == (3, 20, 10)
assert not loaded()

graphs = []

def backend(graph, inputs):
    graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
    return graph.forward

@torch.compile(backend=backend)
def work(x):
    return whole(also_alone(alone(x * 3) * 5))

assert work(one).tolist() == [39, 39]
assert loaded()
assert calls == [False] * 4, calls
assert [whole] in graphs, graphs
assert torch._dynamo is sys.modules["torch._dynamo"]
assert torch._dynamo.__spec__.origin.endswith("__init__.py")
"""
    )


def test_parts_of_the_compiler_bring_it_whole_and_once() -> None:
    run_fresh(
        """
import os, sys, torch
from lazydecode.server.deferring import defer_compiler
defer_compiler()
defer_compiler()
assert not hasattr(sys.modules["torch._dynamo"], "__file__")
for use in (
    "import torch._dynamo.utils as part",
    "from torch._dynamo.utils import is_compile_supported, counters; part = None",
    "from torch._dynamo import config as part",
):
    if os.fork() == 0:
        names = {}
        exec(use, names)
        import torch._dynamo, torch._dynamo.utils as utils
        assert utils is torch._dynamo.utils is sys.modules["torch._dynamo.utils"], use
        assert utils.counters is torch._dynamo.convert_frame.counters, use
        assert torch._dynamo.__file__ and utils.__spec__.origin == utils.__file__, use
        part = names["part"]
        assert part is None or part is sys.modules[part.__name__], use
        os._exit(0)
    status = os.wait()[1]
    assert status == 0, (use, status)
"""
    )


@pytest.mark.slow
def test_a_front_end_has_no_compiler_and_no_code_of_models(
    tiny_model: Callable[..., Path],
) -> None:
    run_fresh(
        f"""
import gc, sys
from lazydecode.server.preloading import preload_libraries, preload_models, preload_server
preload_libraries()
preload_models()
preload_server()
assert gc.isenabled()

from lazydecode.config import Settings
from lazydecode.models.loading import load_model_frontend
frontend = load_model_frontend({str(tiny_model("qwen2_5_vl", weights=False))!r}, Settings())
assert frontend.modalities == ("image", "video")
assert set(frontend.findings.proof.headers.values()) == {{"meta"}}  # by torch's meta device
unwanted = {{
    "torch._dynamo.eval_frame", "triton", "torch.distributed.tensor", "scipy.optimize",
    "transformers.modeling_utils", "transformers.activations", "mistral_common",
}}
assert not unwanted & sys.modules.keys(), unwanted & sys.modules.keys()

# What was put off is there when it is used.
from transformers.utils.type_validators import activation_fn_key
activation_fn_key("gelu")
from transformers import MistralCommonBackend, PreTrainedModel, PreTrainedTokenizerBase
assert issubclass(MistralCommonBackend, PreTrainedTokenizerBase)
from transformers.processing_utils import PreTrainedAudioTokenizerBase
class Own(PreTrainedAudioTokenizerBase):
    pass
assert issubclass(Own, PreTrainedModel)
"""
    )
