"""The command line: `lazydecode serve | render | inspect | make-model | demo | bench`.

May import: everything. Commands are imported when they run, so that `--help` and `inspect` work
without the extras that others need.
"""

from __future__ import annotations

from lazydecode.cli.main import main

__all__ = ["main"]
