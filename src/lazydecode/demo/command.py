"""`lazydecode demo`: real media through a real server, twice."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lazydecode.demo.media import write_media
from lazydecode.demo.origin import serve_folder
from lazydecode.demo.rounds import Result, count_decodes, faults, plan_items, run_round
from lazydecode.demo.server import DemoError, running_servers
from lazydecode.tiny_models import build

MODELS = {
    "image": "qwen2_5_vl",
    "video": "qwen2_5_vl",
    "audio": "qwen2_audio",
    "speech": "whisper",
    "sound": "qwen2_5_omni",
    "raw": "dots3_note",
}
"""Which tiny model answers for which modality, writes speech down, takes a video with its sound,
and opens a video by itself."""
_LOG_WIDTH = 140
_STAGES = ("fetch", "digest", "lookup", "decode", "process")


@click.command("demo", context_settings={"max_content_width": 100})
@click.option(
    "--folder",
    default=".demo",
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for models, media and logs; the models are kept for the next run.",
)
@click.option("--max-tokens", default=12, show_default=True, help="Length of each answer.")
def demo(folder: Path, max_tokens: int) -> None:
    """Send pictures, videos and voices through servers, twice, and show what was done.

    Builds a tiny model for each way that media can take (random weights: the answers mean
    nothing), starts a server for each and a small media origin on loopback, and sends each item
    by http, data or file URL, or as an upload. In the second round every item must be a hit and
    no decoder may run; else the exit status is 1.
    """
    console = Console()
    if not console.is_terminal:  # a log: as wide as the table
        console.width = _LOG_WIDTH
    folder.mkdir(parents=True, exist_ok=True)
    models = {name: _model(folder, name, console) for name in sorted(set(MODELS.values()))}
    with console.status("making media"):
        media_folder = folder / "media"
        media = write_media(media_folder)
    items = plan_items(media, MODELS)
    with serve_folder(media_folder) as origin:
        flags = ["--allowed-private-networks", origin]
        flags += ["--allowed-local-media-path", str(media_folder.resolve())]
        try:
            with contextlib.ExitStack() as stack:
                with console.status("starting the servers"):
                    servers = stack.enter_context(running_servers(models, folder, flags))
                counts = [count_decodes(servers)]
                rounds: list[list[Result]] = []
                for number in (1, 2):
                    with console.status(f"round {number}"):
                        rounds.append(run_round(items, servers, origin, max_tokens=max_tokens))
                    counts.append(count_decodes(servers))
                    console.print(_table(number, rounds[-1]))
        except DemoError as exc:
            raise click.ClickException(f"{exc}\n{_log_tails(folder)}") from exc
    console.print(_answers(rounds[0]))
    console.print(
        f"decoder runs, by the servers' metrics: {counts[1] - counts[0]} in round 1, "
        f"{counts[2] - counts[1]} in round 2"
    )
    wrong = faults(rounds[0], rounds[1], counts[2] - counts[1])
    if wrong:
        raise click.ClickException("; ".join(wrong))
    console.print("round 2: every item was a hit, and nothing was decoded")


def _model(folder: Path, name: str, console: Console) -> Path:
    path = folder / "models" / name
    if not (path / "config.json").exists():
        with console.status(f"building the tiny model {name}"):
            build(name, path)
    return path


def _table(number: int, results: Sequence[Result]) -> Table:
    table = Table(title=f"round {number} (milliseconds)", title_justify="left")
    for heading in ("item", "as", "by", "cache"):
        table.add_column(heading)
    for heading in ("bytes", *_STAGES, "engine", "total"):
        table.add_column(heading, justify="right")
    for result in results:
        for part, timeline in enumerate(result.timelines):
            stages = [timeline.get(f"{stage}_ms") for stage in _STAGES]
            table.add_row(
                "" if part else result.item.path.name,
                timeline["modality"],
                "" if part else result.item.scheme,
                "hit" if timeline["hit"] else "miss",
                f"{timeline['bytes']:,}" if timeline.get("bytes") else "",  # a video's sound: none
                *("-" if value is None else f"{value:.1f}" for value in stages),
                "" if part else f"{result.engine_ms:.0f}",
                "" if part else f"{result.total_ms:.0f}",
            )
    return table


def _answers(results: Sequence[Result]) -> Table:
    table = Table(title="answers (random weights)", title_justify="left")
    table.add_column("item")
    table.add_column("model")
    table.add_column("answer")
    for result in results:
        # repr: random bytes hold control characters; Text: and brackets, which are no markup.
        table.add_row(result.item.path.name, result.item.model, Text(repr(result.answer)))
    return table


def _log_tails(folder: Path, *, num_lines: int = 15) -> str:
    """Return the ends of the servers' logs."""
    tails = []
    for path in sorted(folder.glob("server-*.log")):
        lines = path.read_text(errors="replace").splitlines()[-num_lines:]
        tails.append("\n".join([f"--- {path}", *lines]))
    return "\n".join(tails)
