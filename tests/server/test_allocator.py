from __future__ import annotations

import platform
import subprocess
import sys

import pytest


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's own options")
def test_the_options_are_taken_by_glibc() -> None:
    # In a process of its own: they hold for the whole of it.
    code = "from lazydecode.server.allocator import tune_allocator; assert tune_allocator()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)
