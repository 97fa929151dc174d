"""The command group: commands by name, errors without tracebacks."""

from __future__ import annotations

import importlib
import sys
from typing import Final

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


def main() -> None:
    """Run the command line; the entry point of the `lazydecode` script.

    Exit status: 0 done, 1 the command failed, 2 it was used wrongly.
    """
    try:
        cli(prog_name="lazydecode", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("Aborted.", err=True)
        sys.exit(130)
    except click.exceptions.Exit as exc:
        sys.exit(exc.exit_code)
    except click.ClickException as exc:
        exc.show()
        sys.exit(exc.exit_code)
    except (LazyDecodeError, OSError) as exc:
        click.echo(f"Error: {exc}", err=True)
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)
