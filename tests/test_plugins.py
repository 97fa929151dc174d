"""Parts by name, with packages that are really there: folders with metadata on the import path."""

from __future__ import annotations

import importlib.metadata
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lazydecode.cache import (
    PROCESSOR_CACHE_REGISTRY,
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
    ProcessorCaches,
)
from lazydecode.config import Settings
from lazydecode.errors import LazyDecodeError, PluginBrokenError, PluginError, ValidationError
from lazydecode.media.connector import MediaConnector
from lazydecode.media.connector_registry import MediaConnectorRegistry
from lazydecode.media.video_backends import VideoLoaderRegistry
from lazydecode.models import registry as families
from lazydecode.plugins import Registry
from lazydecode.server.plugin_check import check_plugins

GROUP = "lazydecode.tests_parts"


class Packages:
    """Installs packages into a folder of the import path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: list[str] = []

    def __call__(self, package: str, text: str, *, group: str = GROUP, **offers: str) -> None:
        """Install a module of that text; `offers` are entry points."""
        self.modules.append(package)
        (self.folder / f"{package}.py").write_text(text)
        lines = [f"[{group}]", *(f"{name} = {target}" for name, target in offers.items())]
        self.add_metadata(package, "\n".join(lines))

    def add_metadata(self, package: str, entry_points: str) -> None:
        info = self.folder / f"{package}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    monkeypatch.syspath_prepend(tmp_path)
    packages = Packages(tmp_path)
    yield packages
    for module in packages.modules:
        sys.modules.pop(module, None)


def check_number(value: object) -> None:
    if not isinstance(value, int):
        raise TypeError("it is not a number")


@pytest.fixture
def numbers() -> Registry[int]:
    return Registry(
        "number",
        group=GROUP,
        check=check_number,
        parameter="number",
        built_in={"own": "tests.test_plugins:OWN"},
    )


OWN = 7


# -- registering


def test_registered_and_own_parts_are_found_by_name(numbers: Registry[int]) -> None:
    numbers.add("one", 1)
    assert numbers.register("two")(2) == 2
    assert [numbers.get(name) for name in ("one", "two", "own")] == [1, 2, 7]
    assert numbers.names() == ["one", "own", "two"]
    assert numbers.find("three") is None
    numbers.remove("one")
    assert numbers.find("one") is None


def test_a_name_belongs_to_one_part(numbers: Registry[int]) -> None:
    numbers.add("one", 1)
    numbers.add("one", 1)
    with pytest.raises(ValueError, match="a number named 'one' exists already"):
        numbers.add("one", 2)
    with pytest.raises(ValueError, match="a number named 'own' exists already"):
        numbers.add("own", 8)
    with pytest.raises(TypeError, match="not a number"):
        numbers.add("two", "2")
    assert numbers.names() == ["one", "own"]


def test_an_unknown_name_fails_with_the_known_ones(numbers: Registry[int]) -> None:
    numbers.add("one", 1)
    with pytest.raises(ValidationError) as caught:
        numbers.get("ten")
    error = caught.value
    assert str(error) == "unknown number 'ten'; known are: one, own"
    assert (error.parameter, error.value, error.status) == ("number", "ten", 400)


# -- plug-ins


def test_a_plug_in_is_imported_when_its_name_is_asked_for(
    numbers: Registry[int], install: Packages
) -> None:
    install("plug_good", "FIVE = 5", five="plug_good:FIVE")
    install("plug_other", "SIX = 6", six="plug_other:SIX")
    assert numbers.get("own") == 7
    assert "plug_good" not in sys.modules
    assert numbers.names() == ["five", "own", "six"]
    assert "plug_good" not in sys.modules
    assert numbers.get("five") == 5
    assert "plug_other" not in sys.modules


def test_known_names_cost_no_search(
    numbers: Registry[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[str] = []

    def search(*, group: str) -> list[Any]:
        searches.append(group)
        return []

    monkeypatch.setattr(importlib.metadata, "entry_points", search)
    numbers.add("one", 1)
    numbers.get("one")
    numbers.get("own")
    assert searches == []
    for _ in range(3):
        assert numbers.find("ten") is None
    assert searches == [GROUP]


BROKEN = {
    "raises": ("raise RuntimeError('/secret/path')", "does not load: RuntimeError"),
    "leaves": ("raise SystemExit(3)", "does not load: SystemExit"),
    "lacks": ("", "does not load: AttributeError"),
    "wrong": ("PART = 'text'", "does not fit: it is not a number"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plug_in_fails_with_name_group_and_package_and_alone(
    kind: str, numbers: Registry[int], install: Packages
) -> None:
    text, what = BROKEN[kind]
    install("plug_bad", text, bad="plug_bad:PART")
    install("plug_good", "FIVE = 5", five="plug_good:FIVE")
    message = f"the number plug-in 'bad' (group {GROUP}, from plug_bad 1.2) {what}"
    for _ in range(2):
        with pytest.raises(PluginError) as caught:
            numbers.get("bad")
        assert str(caught.value) == message
        assert (caught.value.status, caught.value.parameter) == (400, "number")
        assert isinstance(caught.value, LazyDecodeError)
    assert numbers.get("five") == 5
    assert numbers.names() == ["five", "own"]
    with pytest.raises(ValidationError, match=r"known are: five, own$"):
        numbers.get("ten")
    assert [str(error) for error in numbers.check_plugins()] == [message]


def test_a_name_that_two_packages_claim_is_nobodys(
    numbers: Registry[int], install: Packages
) -> None:
    install("plug_one", "PART = 1", same="plug_one:PART", mine="plug_one:PART")
    install("plug_two", "PART = 2", same="plug_two:PART")
    with pytest.raises(PluginError) as caught:
        numbers.get("same")
    assert "is offered more than once" in str(caught.value)
    assert "plug_one 1.2" in str(caught.value)
    assert "plug_two 1.2" in str(caught.value)
    assert numbers.get("mine") == 1


def test_a_plug_in_takes_no_name_of_ours_nor_of_a_registered_part(
    numbers: Registry[int], install: Packages
) -> None:
    numbers.add("one", 1)
    install("plug_takes", "PART = 9", own="plug_takes:PART", one="plug_takes:PART")
    problems = [str(error) for error in numbers.check_plugins()]
    assert len(problems) == 2
    assert "'one'" in problems[0]
    assert problems[0].endswith("has the name of a registered number")
    assert problems[1].endswith("has the name of lazydecode's own number")
    assert (numbers.get("one"), numbers.get("own")) == (1, 7)


def test_a_module_may_register_what_it_offers(install: Packages) -> None:
    install(
        "plug_twice",
        "from tests.test_plugins import SHARED\nPART = SHARED.register('twice')(12)\n",
        twice="plug_twice:PART",
    )
    assert SHARED.get("twice") == 12
    assert SHARED.check_plugins() == []
    SHARED.remove("twice")


SHARED: Registry[int] = Registry("number", group=GROUP, check=check_number, parameter="number")


def test_unreadable_metadata_of_one_package_hides_no_other(
    numbers: Registry[int], install: Packages, caplog: pytest.LogCaptureFixture
) -> None:
    install("plug_good", "FIVE = 5", five="plug_good:FIVE")
    install.add_metadata("plug_mess", f"[{GROUP}]\nthis line says nothing\n")
    assert numbers.get("five") == 5
    assert "cannot be read" in caplog.text


def test_a_package_that_comes_later_is_seen_after_a_rescan(
    numbers: Registry[int], install: Packages
) -> None:
    assert numbers.find("five") is None
    install("plug_good", "FIVE = 5", five="plug_good:FIVE")
    assert numbers.find("five") is None
    numbers.rescan()
    assert numbers.find("five") == 5


def test_many_threads_get_the_same_part(numbers: Registry[int], install: Packages) -> None:
    install("plug_big", "PART = 10**30", big="plug_big:PART")
    found: list[int] = []
    barrier = threading.Barrier(8)

    def look_up() -> None:
        barrier.wait()
        found.append(numbers.get("big"))

    threads = [threading.Thread(target=look_up) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(value) for value in found}) == 1


# -- the four kinds


@pytest.mark.parametrize(
    ("make", "group", "target", "what"),
    [
        (MediaConnectorRegistry, "lazydecode.connectors", "dict", "not a subclass of"),
        (VideoLoaderRegistry, "lazydecode.video_backends", "dict", "not a class with load_bytes"),
        (
            lambda: families.MODEL_FAMILY_REGISTRY,
            "lazydecode.model_families",
            "dict",
            "not a lazydecode.models.registry.FamilyRecord",
        ),
        (
            lambda: PROCESSOR_CACHE_REGISTRY,
            "lazydecode.caches",
            "dict",
            "not a lazydecode.cache.ProcessorCaches",
        ),
    ],
)
def test_each_kind_says_what_does_not_fit(
    make: Callable[[], Registry[Any]], group: str, target: str, what: str, install: Packages
) -> None:
    registry = make()
    assert registry.group == group
    install("plug_misfit", f"PART = {target}", group=group, misfit="plug_misfit:PART")
    registry.rescan()
    try:
        with pytest.raises(PluginError, match=rf"'misfit'.*group {group}.*{what}"):
            registry.get("misfit")
    finally:
        registry.rescan()


def test_a_record_from_elsewhere_is_found_by_the_processors_class(install: Packages) -> None:
    install(
        "plug_family",
        "from lazydecode.models.registry import FamilyRecord\n"
        "RECORD = FamilyRecord(reentrant=False, reason='a test')\n",
        group="lazydecode.model_families",
        OutlandishProcessor="plug_family:RECORD",
    )

    class OutlandishProcessor:
        pass

    families.MODEL_FAMILY_REGISTRY.rescan()
    try:
        assert families.has_record(OutlandishProcessor())
        assert not families.record_for(OutlandishProcessor()).reentrant
        assert families.record_for(object()).reentrant
    finally:
        families.MODEL_FAMILY_REGISTRY.rescan()


@pytest.mark.parametrize(
    "fields",
    [
        {"max_items": {"image": "two"}},
        {"max_items": {"image": 0}},
        {"max_items": {"picture": 1}},
        {"max_items": None},
        {"item_text": {"image": b"<image>"}},
        {"header": {"image": "guess"}},
        {"raw_media": "video"},
        {"whole_request": ("video", "picture")},
        {"placement": "behind"},
    ],
    ids=str,
)
def test_a_record_that_would_fail_later_cannot_be_made(fields: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(fields))):
        families.FamilyRecord(**fields)


def test_a_broken_record_is_named_by_whoever_loads_the_model(install: Packages) -> None:
    install(
        "plug_family",
        "from lazydecode.models.registry import FamilyRecord\n"
        "RECORD = FamilyRecord(max_items={'image': 'two'})\n",
        group="lazydecode.model_families",
        OddProcessor="plug_family:RECORD",
    )

    class OddProcessor:
        pass

    families.MODEL_FAMILY_REGISTRY.rescan()
    try:
        with pytest.raises(PluginError, match=r"'OddProcessor' .* does not load: TypeError"):
            families.record_for(OddProcessor())
        assert families.record_for(object()).reentrant
    finally:
        families.MODEL_FAMILY_REGISTRY.rescan()


class Unmakable:
    def __init__(self, **options: Any) -> None:
        raise KeyError("/secret/path")


def test_parts_that_cannot_be_made_fail_with_their_names(caplog: pytest.LogCaptureFixture) -> None:
    connectors = MediaConnectorRegistry()
    connectors.add("odd", type("Odd", (Unmakable, MediaConnector), {"__module__": __name__}))
    with pytest.raises(PluginBrokenError, match="the media connector 'odd' failed: KeyError"):
        connectors.load("odd")
    cache_class = type("Odd", (Unmakable, MultiModalProcessorOnlyCache), {"__module__": __name__})
    caches = ProcessorCaches(
        render=cache_class,
        sender=MultiModalProcessorSenderCache,
        receiver=MultiModalReceiverCache,
    )
    with pytest.raises(PluginBrokenError, match="the processor cache 'odd' failed: KeyError"):
        caches.make("render", "odd", capacity_bytes=1)
    assert isinstance(
        caches.make("sender", "odd", capacity_bytes=1), MultiModalProcessorSenderCache
    )
    assert "/secret/path" in caplog.text


def test_caches_must_belong_together() -> None:
    classes: dict[str, Any] = {
        "render": MultiModalProcessorOnlyCache,
        "sender": MultiModalProcessorSenderCache,
        "receiver": MultiModalReceiverCache,
    }
    assert ProcessorCaches(**classes) == PROCESSOR_CACHE_REGISTRY.get("lru")
    assert ProcessorCaches(**classes).receiver_path == (
        "lazydecode.cache.lru:MultiModalReceiverCache"
    )
    for name in classes:
        with pytest.raises(TypeError, match=f"{name} is not a subclass"):
            ProcessorCaches(**{**classes, name: dict})
    local = type("test.<locals>.Cache", (MultiModalReceiverCache,), {})
    with pytest.raises(ValueError, match="top of a module"):
        ProcessorCaches(**{**classes, "receiver": local})


# -- servers


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"media_connector": "ftp"}, r"unknown media connector 'ftp'; known are: http"),
        ({"mm_processor_cache": "fifo"}, r"unknown processor cache 'fifo'; known are: lru"),
        ({"video_loader_backend": "vhs"}, r"unknown video backend 'vhs'; known are: .*pyav"),
        (
            {"media_io_kwargs": {"video": {"video_backend": "vhs"}}},
            r"unknown video backend 'vhs'; known are: .*pyav",
        ),
        ({"media_connector_kwargs": {"policy": 1}}, r"may not hold policy"),
    ],
)
def test_a_server_does_not_start_with_a_part_that_is_not_there(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        check_plugins(Settings(**settings))


def test_a_server_starts_beside_a_broken_plug_in_that_it_does_not_use(
    install: Packages, caplog: pytest.LogCaptureFixture
) -> None:
    group = "lazydecode.caches"
    install("plug_bad", "raise RuntimeError('boom')", group=group, bad="plug_bad:CACHES")
    PROCESSOR_CACHE_REGISTRY.rescan()
    try:
        with caplog.at_level(logging.ERROR):
            check_plugins(Settings())
        assert f"plug-in 'bad' (group {group}, from plug_bad 1.2)" in caplog.text
        with pytest.raises(PluginError, match=r"plug-in 'bad' .* does not load: RuntimeError"):
            check_plugins(Settings(mm_processor_cache="bad"))
    finally:
        PROCESSOR_CACHE_REGISTRY.rescan()


def test_importing_reads_no_packages_and_imports_no_plug_in() -> None:
    script = (
        "import importlib.metadata, sys\n"
        "def refuse(*args, **kwargs): raise AssertionError('packages were searched')\n"
        "importlib.metadata.entry_points = refuse\n"
        "import lazydecode, lazydecode.plugins, lazydecode.media\n"
        "import lazydecode.media.video, lazydecode.media.connector\n"
        "from lazydecode.media.video_backends import VIDEO_LOADER_REGISTRY\n"
        "VIDEO_LOADER_REGISTRY.get('pyav')\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=180)
