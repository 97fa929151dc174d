"""`lazydecode bench frontend | serve | goals`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from lazydecode.bench.frontend import SECTIONS, FrontendOptions, run_frontend
from lazydecode.bench.goals import goals_grid
from lazydecode.bench.plots import write_plots
from lazydecode.bench.record import read_record, write_record
from lazydecode.bench.serve import ServeOptions, choose, run_serve, without_answer
from lazydecode.bench.tables import show

_DEFAULT_FAMILY: Final = "qwen2_5_vl"
_WIDTH: Final = 170
_ROUNDS: Final = {"full": 15, "short": 7, "tiny": 2}
_MAX_S: Final = {"full": 15.0, "short": 2.0, "tiny": 1.0}
_REQUESTS: Final = {"full": 48, "short": 12, "tiny": 2}
_SHORT: Final = (
    "text", "hot-720p", "headers-720p", "unique-720p", "hot-4k", "video-hot",
    "unseen-4x720p-none", "storm",
)  # fmt: skip

_size = click.option(
    "--size",
    type=click.Choice(["full", "short", "tiny"]),
    default="full",
    show_default=True,
    help="How much is measured; tiny only tries the runner.",
)
_json = click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File for the JSON."
)
_plots = click.option(
    "--plots",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for pictures, SVG and PNG.",
)


@click.group("bench")
def bench() -> None:
    """Measure this library beside the physical floor and beside decoding eagerly.

    Ratios within one run on one machine mean something; absolute times do not.
    """


@bench.command("frontend", context_settings={"max_content_width": 100})
@_size
@click.option("--model", help="Model folder: adds the processor and whole misses.")
@click.option("--rounds", type=click.IntRange(min=1), help="Rounds per row.")
@click.option(
    "--section",
    "sections",
    multiple=True,
    type=click.Choice(SECTIONS),
    help="Only these parts. Repeatable.",
)
@click.option("--item", "items", multiple=True, help="Only rows with this in the name. Repeatable.")
@_json
@_plots
def frontend(
    size: str,
    model: str | None,
    rounds: int | None,
    sections: tuple[str, ...],
    items: tuple[str, ...],
    output: Path | None,
    plots: Path | None,
) -> None:
    """Measure items of every kind: hit, miss, memory, growth.

    \b
    Examples:
      lazydecode bench frontend --size short
      lazydecode bench frontend --model ./models/qwen2_5_vl -o frontend.json
    """
    options = FrontendOptions(
        sizes=size,
        rounds=rounds or _ROUNDS[size],
        max_s=_MAX_S[size],
        model=model,
        sections=sections or SECTIONS,
        items=items,
    )
    with _progress() as progress:
        record = run_frontend(options, progress)
    _finish(record, output, plots)


@bench.command("serve", context_settings={"max_content_width": 100})
@click.argument("model", required=False)
@click.option("--url", help="A server that runs already, instead of MODEL.")
@click.option("--pid", type=int, help="Its process, to see its CPU and memory.")
@click.option("--header", "headers", multiple=True, metavar="NAME:VALUE", help="Repeatable.")
@click.option(
    "--engine",
    type=click.Choice(["none", "transformers"]),
    default="none",
    show_default=True,
    help="transformers: generates, and adds the chat scenarios.",
)
@click.option("--with-eager", is_flag=True, help="Beside it, a server that decodes eagerly.")
@click.option("--no-scaling", is_flag=True, help="Leave out the run on one core.")
@_size
@click.option("--requests", type=click.IntRange(min=1), help="Per scenario and concurrency.")
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    multiple=True,
    help="Repeatable.  [default: 1, 8, 32]",
)
@click.option("--scenario", "names", multiple=True, help="Only these. Repeatable.")
@click.option("--server-flag", "server_flags", multiple=True, help="For `serve`. Repeatable.")
@_json
@_plots
def serve(
    model: str | None,
    url: str | None,
    pid: int | None,
    headers: tuple[str, ...],
    engine: str,
    with_eager: bool,
    no_scaling: bool,
    size: str,
    requests: int | None,
    concurrency: tuple[int, ...],
    names: tuple[str, ...],
    server_flags: tuple[str, ...],
    output: Path | None,
    plots: Path | None,
) -> None:
    """Put a server under load: of MODEL, of a tiny model if none is given, or at --url.

    \b
    Examples:
      lazydecode bench serve ./models/qwen2_5_vl --with-eager
      lazydecode bench serve --url http://127.0.0.1:8000 --pid 4711 --scenario hot-720p
    """
    if model is not None and url is not None:
        raise click.UsageError("give MODEL or --url, not both")
    options = ServeOptions(
        model=model,
        url=url,
        pid=pid,
        headers=_parse_headers(headers),
        engine=engine,
        with_eager=with_eager,
        scaling=not no_scaling,
        requests=requests or _REQUESTS[size],
        concurrency=concurrency or ((1, 8) if size == "short" else (1, 8, 32)),
        names=names or (_SHORT if size == "short" else ()),
        tiny=size == "tiny",
        server_flags=server_flags,
    )
    try:
        choose(options)  # before a model is built for what cannot be run
        with _model_folder(model, url, engine) as folder, _progress() as progress:
            record = run_serve(replace(options, model=folder), progress)
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc
    except RuntimeError as exc:
        raise click.ClickException(str(exc)) from exc
    _finish(record, output, plots)
    if unanswered := without_answer(record):
        raise click.ClickException(f"no request was answered in: {'; '.join(unanswered)}")


@bench.command("goals")
@click.argument("records", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
def goals(records: tuple[Path, ...]) -> None:
    """Show each goal beside floor, eager and what was measured, from JSON files."""
    try:
        by_kind = {record["kind"]: record for record in map(read_record, records)}
    except ValueError as exc:
        raise click.ClickException(str(exc)) from exc
    _console().print(goals_grid(*map(by_kind.get, ("frontend", "serve", "endurance"))).to_rich())


@contextmanager
def _model_folder(model: str | None, url: str | None, engine: str) -> Iterator[str | None]:
    if model is not None or url is not None:
        yield model
        return
    # Of the extra `processing`, which a run against a URL does without.
    from lazydecode.tiny_models import build

    with tempfile.TemporaryDirectory() as folder:
        click.echo(f"building a tiny {_DEFAULT_FAMILY}", err=True)
        yield str(build(_DEFAULT_FAMILY, Path(folder) / _DEFAULT_FAMILY, weights=engine != "none"))


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line that says what is measured: it moves on a terminal, and is a list elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: click.echo(text, err=True)
        return
    with console.status("starting") as status:
        yield status.update


def _console() -> Console:
    """Wide tables, where nobody's terminal says how wide."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def _finish(record: dict[str, Any], output: Path | None, plots: Path | None) -> None:
    show(record, _console())
    if output is not None:
        write_record(record, output)
        click.echo(f"written to {output}", err=True)
    if plots is not None:
        try:
            written = write_plots(record, plots)
        except ImportError as exc:
            raise click.ClickException("--plots needs lazydecode[bench]") from exc
        click.echo(f"written to {', '.join(map(str, written))}", err=True)


def _parse_headers(headers: tuple[str, ...]) -> dict[str, str]:
    parsed = {}
    for header in headers:
        name, colon, value = header.partition(":")
        if not colon:
            raise click.BadParameter(f"{header!r} is not NAME:VALUE", param_hint="--header")
        parsed[name.strip()] = value.strip()
    return parsed
