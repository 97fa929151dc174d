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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's own heap")
def test_free_memory_between_what_is_kept_goes_back_to_the_system() -> None:
    code = """if True:
        import psutil
        from lazydecode.server.allocator import give_back_free_memory, tune_allocator
        rss = lambda: psutil.Process().memory_info().rss
        tune_allocator()
        blocks = [bytearray(b"x" * 100_000) for _ in range(1000)]
        full = rss()
        del blocks[:-1]  # the last one keeps all others from the end of the heap
        assert full - rss() < 10_000_000
        assert give_back_free_memory()
        assert full - rss() > 90_000_000
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)
