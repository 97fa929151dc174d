"""The command group: commands by name, errors without tracebacks."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import signal
import sys
import threading
from typing import Final, NoReturn

import click

from lazydecode import __version__
from lazydecode.errors import LazyDecodeError

_COMMANDS: Final[dict[str, tuple[str, str, str]]] = {
    "serve": ("lazydecode.cli.serve:serve", "serve", "Serve a model over the OpenAI API."),
    "render": (
        "lazydecode.cli.render:render",
        "serve",
        "Render one chat request offline, as the server's render route does.",
    ),
    "inspect": (
        "lazydecode.cli.inspect:inspect",
        "",
        "Show what media files or a model folder say about themselves.",
    ),
    "transcribe": (
        "lazydecode.cli.transcribe:transcribe",
        "serve",
        "Write down what is said in a recording, without a server.",
    ),
    "make-model": (
        "lazydecode.tiny_models.command:make_model",
        "processing",
        "Build a tiny local model of a family.",
    ),
    "demo": (
        "lazydecode.demo.command:demo",
        "serve",
        "Send media through a server twice; the second time nothing is decoded.",
    ),
    "bench": (
        "lazydecode.cli.bench:bench",
        "bench",
        "Measure beside the physical floor and beside decoding eagerly.",
    ),
}
"""Name -> (module:command, extra that it needs, one line of help)."""


class _LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = _COMMANDS.get(cmd_name)
        if entry is None:
            return None
        path, extra, _ = entry
        module_name, _, attribute = path.partition(":")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as exc:
            if exc.name is None or exc.name.partition(".")[0] == "lazydecode":
                raise
            raise click.ClickException(
                f"'{cmd_name}' needs the package {exc.name}: "
                f"pip install 'lazydecode[{extra or 'dev'}]'"
            ) from exc
        command: click.Command = getattr(module, attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry[2]) for name, entry in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lazydecode")
def cli() -> None:
    """Media stay encoded until a cache proves that they must be decoded."""


def main() -> NoReturn:
    """Run the command line; the entry point of the `lazydecode` script.

    Exit status: 0 done, 1 the command failed, 2 it was used wrongly.
    """
    _leave(_run())


def _run() -> int:
    """Run the command and return the exit status."""
    try:
        cli(prog_name="lazydecode", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("Aborted.", err=True)
        return 130
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except click.ClickException as exc:
        exc.show()
        return exc.exit_code
    except (LazyDecodeError, OSError) as exc:
        if not isinstance(exc, BrokenPipeError):
            click.echo(f"Error: {exc}", err=True)
        return 1
    return 0


def _leave(status: int) -> NoReturn:
    """End the process without taking the interpreter apart.

    That would free, one by one, the half a million objects of torch and Transformers: 2 to 3 s.
    What was registered to run at the end does run, and everything that was written is out.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it is ending, and no traceback shall say so
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a reader that left; a closed stream
            stream.flush()
    os._exit(status)
