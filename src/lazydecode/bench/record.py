"""The frame of every result: on which machine, with which versions, at which commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import psutil

import lazydecode

FORMAT: Final = 1
"""Of the JSON record; a reader refuses others."""
_PACKAGES: Final = (
    "aiohttp",
    "av",
    "cryptography",
    "msgspec",
    "numpy",
    "pillow",
    "pybase64",
    "soundfile",
    "soxr",
    "tokenizers",
    "torch",
    "torchvision",
    "transformers",
    "uvicorn",
    "uvloop",
)


def new_record(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return a record without results yet."""
    return {
        "format": FORMAT,
        "kind": kind,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "settings": settings,
    }


def machine() -> dict[str, Any]:
    """What runs the benchmark, and how busy it was before."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "load_before": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Package -> version, of those that are installed."""
    found = {"python": platform.python_version(), "lazydecode": lazydecode.__version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Hash of the checkout that this package runs from, marked if changed; None if installed."""
    folder = Path(lazydecode.__file__).parent
    try:
        head = _git(folder, "rev-parse", "--short=12", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", str(folder))
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}+changes" if changed else head


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write the record, with the load that was left behind."""
    record["machine"]["load_after"] = round(os.getloadavg()[0], 2)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")


def read_record(path: Path) -> dict[str, Any]:
    """Read a record.

    Raises:
        ValueError: If it is not one of ours.
    """
    try:
        record = json.loads(path.read_text("utf-8"))
    except ValueError:
        record = None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"{path.name} is not a benchmark record of format {FORMAT}")
    return record


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)  # noqa: S603  # fixed words
    return done.stdout.strip()


def _cpu_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
