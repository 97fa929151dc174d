"""`lazydecode.media` as a package: what it imports and what it exports."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lazydecode.media as media


def test_importing_everything_public_needs_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, threading, lazydecode.media as media\n"
        "[getattr(media, name) for name in media.__all__]\n"
        "heavy = {'torch', 'transformers', 'torchvision', 'torchaudio', 'scipy', 'pandas'}\n"
        "print(sorted(heavy & set(sys.modules)), threading.active_count())"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output == "[] 1\n"


def test_importing_the_package_loads_no_decoder() -> None:
    program = (
        "import sys, lazydecode.media\n"
        "print(sorted({'av', 'PIL.Image', 'soundfile', 'aiohttp'} & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output == "[]\n"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = media.Nothing
