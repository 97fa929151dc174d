"""`lazydecode transcribe FILE --model MODEL`."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lazydecode.cli.settings_options import settings_from_flags, settings_options
from lazydecode.config import Settings

_SERVER_ONLY = ("engine", "host", "port", "api_key", "served_model_name")
_FORMATS = ("text", "json", "verbose_json", "srt", "vtt")


@click.command("transcribe", context_settings={"max_content_width": 100})
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--model", required=True, help="A model folder, or an id on the hub.")
@click.option("--language", help="Language that is spoken; none given: the model hears it.")
@click.option("--prompt", default="", help="Words to expect, or what was said before.")
@click.option("--translate", is_flag=True, help="Answer in English.")
@click.option(
    "--format", "response_format", type=click.Choice(_FORMATS), default="text", show_default=True
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File for the transcript.")
@settings_options(leave_out=_SERVER_ONLY)
def transcribe(
    file: Path,
    model: str,
    language: str | None,
    prompt: str,
    translate: bool,
    response_format: str,
    output: Path | None,
    **flags: Any,
) -> None:
    """Write down what is said in FILE, as the server's route does, without a server.

    The transcript goes to standard output; progress to standard error.

    \b
    Examples:
      lazydecode transcribe talk.mp3 --model openai/whisper-small --format srt -o talk.srt
    """
    settings = settings_from_flags(flags)
    fields = {
        "response_format": response_format,
        "prompt": prompt,
        **({"language": language} if language else {}),
    }
    try:
        data = file.read_bytes()
    except OSError as exc:
        raise click.BadParameter(f"{file}: {exc.strerror}", param_hint="FILE") from exc
    text = asyncio.run(_transcribe(model, settings, data, fields, translate=translate))
    if output is None:
        click.echo(text, nl=not text.endswith("\n"))
    else:
        output.write_text(text, "utf-8")


async def _transcribe(
    model: str, settings: Settings, data: bytes, fields: dict[str, str], *, translate: bool
) -> str:
    console = Console(stderr=True)
    with console.status(f"Loading {escape(model)}"):
        # Of the extra `serve`, and seconds of imports that `--help` need not wait for.
        from lazydecode.renderers.timeline import Timeline
        from lazydecode.server.loading import load_context
        from lazydecode.server.transcribing import open_transcription, recording_io, speech_of
        from lazydecode.server.transcription_form import check_abilities, parse_form

        context = load_context(model, settings)
    # A translation has no field for the language, but it may be known all the same.
    wanted = parse_form(list(fields.items()), "transcribe")
    if translate:
        wanted = wanted.translated()
    check_abilities(wanted, speech_of(context))
    recording_io(context).check_size(len(data))
    with console.status("Starting the engine") as status:
        async with context.running():
            status.stop()
            async with open_transcription(
                context, data, wanted, timeline=Timeline()
            ) as transcription:
                with _progress(console) as progress:
                    task = progress.add_task("Transcribing", total=transcription.duration_s)
                    async with aclosing(transcription.deltas()) as deltas:
                        async for _ in deltas:
                            progress.update(task, completed=transcription.done_s)
                    progress.update(task, completed=transcription.done_s)
                transcript = transcription.transcript()
    if wanted.response_format == "json":
        return json.dumps(transcript.to_json(), ensure_ascii=False)
    if wanted.response_format == "verbose_json":
        return json.dumps(transcript.to_verbose_json(), ensure_ascii=False)
    return transcript.to_text(wanted.response_format)[0]


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} s"),
        TimeElapsedColumn(),
        console=console,
    )
