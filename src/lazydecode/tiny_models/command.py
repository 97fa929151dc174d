"""`lazydecode make-model`: build tiny models from the command line."""

from __future__ import annotations

import time
from pathlib import Path

import click

from lazydecode.tiny_models.builder import BuildError, build
from lazydecode.tiny_models.families import FAMILIES, TEXT_FAMILIES


@click.command("make-model", context_settings={"max_content_width": 100})
@click.argument("family", required=False)
@click.argument("directory", required=False, type=click.Path(path_type=Path, file_okay=False))
@click.option("--list", "show_list", is_flag=True, help="Show the families and exit.")
@click.option(
    "--all",
    "all_into",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Build every family, each in its own folder below DIR.",
)
@click.option("--no-weights", is_flag=True, help="Leave out the weights: enough for render.")
@click.option("--seed", default=0, show_default=True, help="What the weights are drawn from.")
def make_model(
    family: str | None,
    directory: Path | None,
    show_list: bool,
    all_into: Path | None,
    no_weights: bool,
    seed: int,
) -> None:
    """Build a tiny local model of FAMILY in DIRECTORY.

    The folder has the family's real configuration and processor classes with published
    parameters, a tokenizer trained here with the family's control tokens, its chat template and
    random weights. Nothing is downloaded; the same arguments give the same bytes.

    \b
    Examples:
      lazydecode make-model qwen2_5_vl models/qwen2_5_vl
      lazydecode make-model --all models --no-weights
    """
    if show_list:
        _show_families()
        return
    if all_into is not None:
        if family is not None:
            raise click.UsageError("Give FAMILY and DIRECTORY, or --all DIR, not both.")
        _build_all(all_into, weights=not no_weights, seed=seed)
        return
    if family is None or directory is None:
        raise click.UsageError("Give FAMILY and DIRECTORY, or --all DIR. --list shows families.")
    if family not in FAMILIES and family not in TEXT_FAMILIES:
        raise click.BadParameter(
            f"no family is called {family!r}; --list shows those that exist.", param_hint="FAMILY"
        )
    if directory.exists() and not (directory / "config.json").exists() and any(directory.iterdir()):
        raise click.BadParameter(
            "the folder exists and holds something other than a model; it would be replaced.",
            param_hint="DIRECTORY",
        )
    try:
        click.echo(_build_one(family, directory, weights=not no_weights, seed=seed))
    except BuildError as exc:
        raise click.ClickException(str(exc)) from exc


def _show_families() -> None:
    for name, record in {**FAMILIES, **TEXT_FAMILIES}.items():
        kinds = "+".join(record.modalities) or "text"
        remarks = [record.note] if record.note else []
        if record.no_weights:
            remarks.append(f"no weights: {record.no_weights}")
        click.echo(
            f"{name:24} {kinds:18} {record.processor or '-':38} {'; '.join(remarks)}".rstrip()
        )


def _build_one(family: str, directory: Path, *, weights: bool, seed: int) -> str:
    """Build one folder and return a line that says what was made."""
    started = time.perf_counter()
    build(family, directory, weights=weights, seed=seed)
    elapsed = time.perf_counter() - started
    size = sum(path.stat().st_size for path in directory.iterdir()) / 1e6
    return f"{family:24} {size:6.1f} MB {elapsed:6.1f} s  {directory}"


def _build_all(root: Path, *, weights: bool, seed: int) -> None:
    """Build every family; go on after a failure and report all of them at the end."""
    names = [*FAMILIES, *TEXT_FAMILIES]
    failures = []
    for number, name in enumerate(names, 1):
        try:
            line = _build_one(name, root / name, weights=weights, seed=seed)
        except BuildError as exc:
            failures.append(str(exc))
            line = f"{name:24} not built: {exc}"
        click.echo(f"[{number:2}/{len(names)}] {line}")
    if failures:
        raise click.ClickException(f"{len(failures)} of {len(names)} families were not built.")
