"""What identifies and parses media needs no torch until someone brings a tensor."""

from __future__ import annotations

import subprocess
import sys


def test_parsing_hashing_and_caching_import_no_torch() -> None:
    code = (
        "import sys; import lazydecode.inputs, lazydecode.parse, lazydecode.hasher, "
        "lazydecode.cache, lazydecode.processing.inputs, lazydecode.processing.placement; "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
