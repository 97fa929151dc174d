"""`lazydecode serve MODEL`."""

from __future__ import annotations

import logging
from typing import Any

import click

from lazydecode.cli.settings_options import settings_from_flags, settings_options


@click.command("serve", context_settings={"max_content_width": 100})
@click.argument("model")
@settings_options()
def serve(model: str, **flags: Any) -> None:
    """Serve MODEL, a local folder or a hub id, over the OpenAI API.

    Every flag is also an environment variable: --max-image-pixels is
    LAZYDECODE_MAX_IMAGE_PIXELS. Ctrl-C and SIGTERM let running requests finish, then end.

    \b
    Examples:
      lazydecode serve ./models/qwen2_5_vl
      lazydecode serve ./models/qwen2_5_vl --engine none --port 9000
    """
    settings = settings_from_flags(flags)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # Of the extra `serve`, which `--help` does not need.
    from lazydecode.server.run import run_server

    run_server(model, settings)
