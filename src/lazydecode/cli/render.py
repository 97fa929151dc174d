"""`lazydecode render MODEL REQUEST.json`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape

from lazydecode.cli.settings_options import settings_from_flags, settings_options
from lazydecode.config import Settings

if TYPE_CHECKING:
    from lazydecode.server.features import AnswerBody
    from lazydecode.server.protocol import Payload

_SERVER_ONLY = ("engine", "host", "port", "api_key", "max_batch_size", "device")


@click.command("render", context_settings={"max_content_width": 100})
@click.argument("model")
@click.argument("request_file", metavar="REQUEST.json", type=click.Path(path_type=Path))
@click.option(
    "--payload",
    type=click.Choice(["tensors", "metadata", "none"]),
    help="What the answer holds of each item: all tensors, grids and sizes alone, or nothing; "
    "none given: what the request says.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File for the answer.")
@settings_options(leave_out=_SERVER_ONLY)
def render(
    model: str, request_file: Path, payload: Payload | None, output: Path | None, **flags: Any
) -> None:
    """Render one chat request for MODEL, as the server's render route does, without a server.

    REQUEST.json holds an OpenAI chat request; - reads it from standard input. The answer goes
    to standard output.

    \b
    Examples:
      lazydecode render ./models/qwen2_5_vl request.json --payload none
    """
    settings = settings_from_flags(flags).model_copy(update={"engine": "none"})
    try:
        body = sys.stdin.buffer.read() if str(request_file) == "-" else request_file.read_bytes()
    except OSError as exc:
        raise click.BadParameter(
            f"{request_file}: {exc.strerror}", param_hint="REQUEST.json"
        ) from exc
    answer = asyncio.run(_render(model, settings, body, payload))
    if output is None:
        for piece in answer.pieces():
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.write(b"\n")
        sys.stdout.buffer.flush()
        return
    with output.open("wb") as file:
        file.writelines(answer.pieces())


async def _render(
    model: str, settings: Settings, body: bytes, payload: Payload | None
) -> AnswerBody:
    with Console(stderr=True).status(f"Loading {escape(model)}"):
        # Of the extra `serve`, and seconds of imports that `--help` need not wait for.
        from lazydecode.server.loading import load_context
        from lazydecode.server.rendering import render_offline

        context = load_context(model, settings)
    async with context.running():
        return await render_offline(context, body, payload=payload)
