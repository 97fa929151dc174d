"""Small frozen objects that say how far each part may go.

`config.Settings` builds them; a part takes only the one it needs, so two connectors in one
process can differ. Defaults are written here, once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """Which URLs may be fetched at all."""

    allowed_domains: tuple[str, ...] = ()
    """Exact host names, or host:port pairs, that http(s) URLs may name, at every hop. Empty: all
    public hosts."""
    allowed_private_networks: tuple[str, ...] = ()
    """CIDR blocks or host:port pairs that are reachable although they are not public."""
    allowed_local_media_path: Path | None = None
    """Folder below which `file:` URLs may point. None: no `file:` URLs."""
    allow_redirects: bool = True
    max_redirects: int = 10
    https_only: bool = False


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """How much and how long one fetch may take."""

    max_bytes: int = 256 * MIB
    """Encoded bytes of one item, for every scheme, after content decoding."""
    image_timeout_s: float = 5.0
    video_timeout_s: float = 30.0
    audio_timeout_s: float = 10.0
    idle_timeout_s: float = 5.0
    """Longest wait for an answer, and between two chunks; for a connection at most half the
    fetch's time-out, so that there is time for a second attempt."""
    max_retries: int = 3
    """Attempts in all for what can pass; a fetch's time-out covers them and their pauses."""
    max_known_payloads: int = 16384
    """Local files and downloads on disk whose identity is remembered while they are unchanged,
    about 1 KB each; 0: none. As many base64 texts apart from them, up to 4,096."""


@dataclass(frozen=True, slots=True)
class DownloadCacheLimits:
    """The download cache on disk; off while `folder` is None."""

    folder: Path | None = None
    max_bytes: int = 5120 * MIB
    max_age_s: float = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What one decode may produce. No part of a media key: it changes no decoded value."""

    max_image_pixels: int = 178_956_970
    """Width times height from the header; 0 turns the check off."""
    max_audio_clip_bytes: int = 25 * MIB
    max_audio_duration_s: float = 600.0
    max_audio_decoded_bytes: int = 256 * MIB
    max_embedding_bytes: int = 256 * MIB
    """Bytes of one embedding that came as a sparse tensor, once it is dense."""
    max_video_frames: int = 2048
    """Frames that one video item may keep after sampling."""
    max_video_decoded_bytes: int = 4096 * MIB
    """Bytes of RGB frames that one video item may keep after sampling."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request, and all requests together, may hold."""

    max_items: dict[str, int] = field(default_factory=dict)
    """Items per modality per request; a modality that is not named has no limit of ours."""
    max_body_bytes: int = 512 * MIB
    max_body_stall_s: float = 30.0
    """How far the arrival of a body may fall behind a slow connection's; then 408."""
    max_prompt_chars: int = 4 * 1024 * 1024
    """Characters of a request's text, structure counted as `renderers.text_size` says; also token
    ids that come in its place. A million tokens of English have about as many."""
    max_encoded_bytes_per_request: int = 1024 * MIB
    max_decoded_bytes_per_request: int = 4096 * MIB
    max_encoded_bytes: int = 4096 * MIB
    """Encoded bytes held by all requests together; more wait."""
    max_decoded_bytes: int = 8192 * MIB
    """Decoded bytes held by all requests together; more wait."""
    max_waiting: int = 1024
    """Requests that may wait; the next one gets 503."""
    max_wait_s: float = 60.0
    """Longest wait for a budget; then 503."""
