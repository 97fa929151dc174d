"""The example package of plug-ins, installed by pip and used by a server in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "plugin-package"

pytestmark = pytest.mark.slow  # two processes import torch, and a third runs pip


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which pip has installed the package; no network is used."""
    target = tmp_path_factory.mktemp("plug-ins")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)),
            str(PACKAGE),
        ],
        check=True,
        timeout=120,
    )
    return target


def run(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    own = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, (str(installed), str(ROOT), own)))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def session(
    installed: Path, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What a server with the package's parts did."""
    done = run(
        installed,
        *("-m", "tests.examples.plugin_session", str(tiny_model("qwen2_5_vl"))),
        str(tmp_path_factory.mktemp("buckets")),
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_pip_writes_the_entry_points(installed: Path) -> None:
    (info,) = installed.glob("lazydecode_example-*.dist-info")
    text = (info / "entry_points.txt").read_text()
    for group in ("connectors", "video_backends", "model_families", "caches"):
        assert f"[lazydecode.{group}]" in text


def test_the_server_runs_with_the_chosen_parts(session: dict[str, Any]) -> None:
    assert session["parts"] == {"connector": "BucketConnector", "sender": "SmallItemsSenderCache"}


def test_an_object_renders_as_the_same_bytes_elsewhere(session: dict[str, Any]) -> None:
    rendered = session["rendered"]
    assert rendered["bucket"] == rendered["data"]
    assert len(rendered["bucket"]) > 5


@pytest.mark.parametrize(
    ("url", "status", "message"),
    [
        ("bucket://photos/none.png", 422, "does not exist"),
        ("bucket://photos/empty.png", 422, "is empty"),
        ("bucket://photos/../other/cat.png", 400, "'..' parts"),
        ("bucket://photos/%2e%2e/other/cat.png", 400, "'..' parts"),
        ("bucket://photos/out.png", 400, "must be a subpath"),
        ("bucket://other/cat.png", 400, "'other' is not one that URLs may name"),
        ("bucket://photos", 400, "bucket://NAME/KEY"),
        ("file:///etc/hostname", 400, "Cannot load local files"),
    ],
)
def test_the_connector_checks_what_urls_may_name(
    url: str, status: int, message: str, session: dict[str, Any]
) -> None:
    found_status, found_message = session["refused"][url]
    assert found_status == status
    assert message in found_message
    assert "image 0" in found_message


def test_the_backend_is_chosen_by_name(session: dict[str, Any]) -> None:
    assert session["head"] == [0, 1, 2]
    status, message = session["unknown_backend"]
    assert status == 400
    assert "unknown video backend 'vhs'; known are: head, nvdec, opencv, pyav" in message


def test_the_familys_record_holds(session: dict[str, Any]) -> None:
    status, message = session["three_images"]
    assert status == 400
    assert "2" in message


def test_both_ends_of_the_cache_decide_alike(session: dict[str, Any]) -> None:
    caches = session["caches"]
    assert caches["sender"] == caches["engine"]
    assert len(caches["sender"]) == 1
    assert caches["entries_metric"] == 1
    assert caches["hits"] == 1
    assert caches["texts"][:2] == caches["texts"][2:]


def test_a_server_names_the_installed_parts_before_it_loads_a_model(
    installed: Path, tmp_path: Path
) -> None:
    done = run(
        installed,
        *("-m", "lazydecode", "serve", str(tmp_path / "no-model"), "--engine", "none"),
        *("--port", "0", "--media-connector", "ftp"),
    )
    assert done.returncode == 1
    assert "unknown media connector 'ftp'; known are: bucket, http" in done.stderr
    assert "Traceback" not in done.stderr
