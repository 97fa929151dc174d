"""Every field of `Settings` as a command-line flag, written nowhere twice."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import click
from pydantic import ValidationError as PydanticValidationError
from pydantic.fields import FieldInfo

from lazydecode.config import Settings, load_settings

_F = TypeVar("_F", bound=Callable[..., Any])


class _JsonObject(click.ParamType[dict[str, Any]]):
    """A JSON object on the command line."""

    name = "json"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        try:
            parsed = json.loads(value)
        except ValueError as exc:
            self.fail(f"{value!r} is not JSON: {exc}", param, ctx)
        if not isinstance(parsed, dict):
            self.fail(f"{value!r} is not a JSON object", param, ctx)
        return parsed


def settings_options(*, leave_out: Collection[str] = ()) -> Callable[[_F], _F]:
    """Decorate a command with `--config` and one flag per settings field.

    The command receives them as keyword arguments; `settings_from_flags` takes them back. A
    flag that was not given is None, so that the configuration file and the environment count.
    """

    def decorate(command: _F) -> _F:
        for name, field in reversed(Settings.model_fields.items()):
            if name not in leave_out:
                command = _option(name, field)(command)
        return click.option(
            "--config",
            type=click.Path(path_type=Path, exists=True, dir_okay=False),
            help="TOML or JSON file with settings; flags and environment win over it.",
        )(command)

    return decorate


def settings_from_flags(flags: dict[str, Any]) -> Settings:
    """Build the settings from a command's keyword arguments.

    Raises:
        click.UsageError: If a value is wrong; it names the flag.
    """
    given = dict(flags)
    config = given.pop("config", None)
    given = {name: value for name, value in given.items() if value is not None and value != ()}
    try:
        return load_settings(given, config_file=config)
    except PydanticValidationError as exc:
        raise click.UsageError("\n".join(_explain(error) for error in exc.errors())) from exc
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc


def _explain(error: Any) -> str:
    flag, *rest = (str(part) for part in error["loc"]) if error["loc"] else ("",)
    where = f"--{flag.replace('_', '-')}" + "".join(f"[{part}]" for part in rest)
    return f"{where}: {error['msg']}"


def _option(name: str, field: FieldInfo) -> Callable[[_F], _F]:
    flag = "--" + name.replace("_", "-")
    annotation = _without_none(field.annotation)
    default = field.get_default(call_default_factory=True)
    help_text = f"{field.description or ''}"
    attributes: dict[str, Any] = {"default": None}
    shown = ""
    if annotation is bool:
        shown = flag if default else flag.replace("--", "--no-", 1)
        flag = f"{flag}/--no-{name.replace('_', '-')}"
    elif typing.get_origin(annotation) is Literal:
        attributes["type"] = click.Choice([str(value) for value in typing.get_args(annotation)])
        shown = str(default)
    elif typing.get_origin(annotation) is tuple:
        attributes |= {"multiple": True, "default": (), "metavar": "TEXT"}
        help_text += " Repeatable."
    elif typing.get_origin(annotation) is dict:
        attributes |= {"type": _JsonObject(), "metavar": "JSON"}
    elif annotation is Path:
        attributes |= {"type": click.Path(path_type=Path), "metavar": "PATH"}
    else:
        attributes["type"] = annotation
        if default is not None:
            shown = f"{default:g}" if annotation is float else str(default)
    if shown:
        help_text += f"  [default: {shown}]"
    return click.option(flag, name, help=help_text, **attributes)


def _without_none(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        if len(kinds) == 1:
            return kinds[0]
    return annotation
