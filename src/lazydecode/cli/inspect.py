"""`lazydecode inspect FILE|URL|MODEL…`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lazydecode.cli.settings_options import settings_from_flags, settings_options
from lazydecode.config import Settings
from lazydecode.errors import LazyDecodeError
from lazydecode.media.audio import AudioMediaIO
from lazydecode.media.base import MediaIO, MediaRef, VideoHeader
from lazydecode.media.connector_registry import MEDIA_CONNECTOR_REGISTRY
from lazydecode.media.download_cache import DownloadCache
from lazydecode.media.image import ImageMediaIO
from lazydecode.media.video import VideoMediaIO

_MODALITIES: Final = ("image", "video", "audio")
_MAX_SHOWN_CHARS: Final = 200
"""Of one value in a table; --json shows all."""
_KEPT: Final = (
    "allowed_media_domains",
    "allowed_private_networks",
    "allowed_local_media_path",
    "media_redirects",
    "max_media_redirects",
    "https_only",
    "media_connector",
    "media_connector_kwargs",
    "max_media_download_mb",
    "image_fetch_timeout",
    "video_fetch_timeout",
    "audio_fetch_timeout",
    "media_idle_timeout",
    "media_fetch_max_retries",
    "media_cache",
    "video_loader_backend",
    "trust_exif_image_id",
    "max_image_pixels",
    "max_audio_clip_filesize_mb",
    "max_audio_decode_duration",
    "max_audio_decode_mb",
    "max_video_frames",
    "max_video_decode_mb",
    "media_io_kwargs",
    "trust_remote_code",
    "chat_template",
)
"""Settings that matter here."""


@click.command("inspect", context_settings={"max_content_width": 100})
@click.argument("sources", metavar="FILE|URL|MODEL...", nargs=-1, required=True)
@click.option("--modality", type=click.Choice(_MODALITIES), help="Instead of what it looks like.")
@click.option("--decode", is_flag=True, help="Decode as well, and show what came out.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@settings_options(leave_out=[name for name in Settings.model_fields if name not in _KEPT])
def inspect(
    sources: Sequence[str], modality: str | None, decode: bool, as_json: bool, **flags: Any
) -> None:
    """Show the identity of media, and what they say about themselves, without decoding.

    A folder with a config.json is a model: then its modalities and how they were proven are
    shown. Exit status 1 if one of the sources cannot be inspected; the others are shown.

    \b
    Examples:
      lazydecode inspect photo.jpg clip.mp4 --decode
      lazydecode inspect https://example.com/photo.jpg --json
      lazydecode inspect ./models/qwen2_5_vl
    """
    settings = settings_from_flags(flags)
    failed = False
    for source in sources:
        try:
            report = _inspect(source, settings, modality, decode)
        except (LazyDecodeError, OSError) as exc:
            failed = True
            reason = exc.strerror if isinstance(exc, OSError) else None
            report = {"source": source, "error": reason or str(exc)}
        _show(report, as_json)
    if failed:
        sys.exit(1)


def _inspect(source: str, settings: Settings, modality: str | None, decode: bool) -> dict[str, Any]:
    path = Path(source)
    if path.is_dir():
        if not (path / "config.json").exists():
            raise IsADirectoryError(0, "a folder without config.json is neither media nor a model")
        with Console(stderr=True).status(f"Loading {escape(source)} and probing its processor"):
            # Of the extra `processing`.
            from lazydecode.cli.inspect_model import inspect_model

            return {"source": source, **inspect_model(source, settings)}
    decoders = _decoders(settings)
    load = _loader(source, settings)
    kinds = [modality] if modality else list(_MODALITIES)
    refs: dict[str, MediaRef[Any]] = {}
    for kind in kinds:
        refs[kind] = ref = load(decoders[kind])
        header = ref.header
        if header is not None and not (isinstance(header, VideoHeader) and not header.width):
            break
    else:
        # No header of any kind: shown as what was asked for, or as the first kind.
        kind = kinds[0]
    ref = refs[kind]
    report = {
        "source": source if len(source) < 200 else source[:60] + "…",
        "modality": kind,
        "bytes": len(ref.data),
        "key": ref.key.hex(),
        "spec": ref.spec.settings,
        "header": None if ref.header is None else asdict(ref.header),
    }
    if decode:
        report["decoded"] = _describe_decoded(kind, ref.decode())
    return report


def _decoders(settings: Settings) -> dict[str, MediaIO[Any]]:
    limits, options = settings.decode_limits, settings.media_io_kwargs
    image_io = ImageMediaIO(
        limits=limits,
        trust_exif_image_id=settings.trust_exif_image_id,
        **options.get("image", {}),
    )
    return {
        "image": image_io,
        "video": VideoMediaIO(
            image_io,
            limits=limits,
            default_backend=settings.video_loader_backend,
            **options.get("video", {}),
        ),
        "audio": AudioMediaIO(limits=limits, **options.get("audio", {})),
    }


def _loader(source: str, settings: Settings) -> Callable[[MediaIO[Any]], MediaRef[Any]]:
    """Return what loads `source`; a plain path is the user's own file, under no URL policy."""
    if "://" not in source and source[:5].lower() != "data:":
        path = Path(source)
        return lambda media_io: media_io.load_file_ref(path)

    def load(media_io: MediaIO[Any]) -> MediaRef[Any]:
        limits = settings.download_cache_limits
        with MEDIA_CONNECTOR_REGISTRY.load(
            settings.media_connector,
            **settings.media_connector_kwargs,
            policy=settings.fetch_policy,
            limits=settings.fetch_limits,
            download_cache=None if limits.folder is None else DownloadCache(limits),
        ) as connector:
            return connector.load_from_url(source, media_io)

    fetched: list[bytes] = []

    def load_once(media_io: MediaIO[Any]) -> MediaRef[Any]:
        if fetched:
            return media_io.load_bytes_ref(fetched[0])
        ref = load(media_io)
        fetched.append(ref.data)
        return ref

    return load_once


def _describe_decoded(modality: str, media: Any) -> dict[str, Any]:
    if modality == "image":
        return {"width": media.width, "height": media.height, "mode": media.mode}
    array, detail = media
    if modality == "audio":
        return {
            "samples": len(array),
            "rate_hz": detail,
            "duration_s": len(array) / detail,
            "peak": float(abs(array).max()) if len(array) else 0.0,
        }
    frames, height, width = array.shape[:3]
    return {"frames": frames, "height": height, "width": width, "metadata": dict(detail)}


def _show(report: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(report, default=_plain))
        return
    if "error" in report:
        click.echo(f"{report['source']}: {report['error']}", err=True)
        return
    table = Table(title=escape(str(report["source"])), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _flatten(report):
        table.add_row(name, escape(value))
    Console().print(table)


def _plain(value: Any) -> Any:
    """JSON form of what metadata may hold beside JSON values: arrays, and numpy's numbers."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _flatten(report: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in report.items():
        if name == "source":
            continue
        if isinstance(value, Mapping) and value:
            rows += _flatten(value, f"{prefix}{name}.")
        else:
            shown = value if isinstance(value, str) else json.dumps(value, default=_plain)
            if len(shown) > _MAX_SHOWN_CHARS:
                shown = shown[: _MAX_SHOWN_CHARS - 2] + " …"
            rows.append((prefix + name, shown))
    return rows
