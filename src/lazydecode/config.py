"""Settings: one frozen object, built once from flags, file and environment, and handed down.

Fields are flat, so that each is one flag (`--max-image-pixels`) and one environment variable
(`LAZYDECODE_MAX_IMAGE_PIXELS`); parts take the small objects of `limits`, which the properties
below build. This is the only module that reads the environment.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from lazydecode.limits import (
    MIB,
    DecodeLimits,
    DownloadCacheLimits,
    FetchLimits,
    FetchPolicy,
    RequestLimits,
)

_FETCH = FetchLimits()
_DECODE = DecodeLimits()
_REQUEST = RequestLimits()
_DISK = DownloadCacheLimits()
_RECORDING_BYTES_PER_S = 48000 * 2 * 4
"""Of a recording in stereo at the highest usual rate, while it is decoded."""


class Settings(BaseSettings):
    """Everything that can be set, with its default and what it means (shown by `--help`)."""

    model_config = SettingsConfigDict(env_prefix="LAZYDECODE_", frozen=True, extra="forbid")

    # -- what may be fetched
    allowed_media_domains: tuple[str, ...] = Field(
        (),
        description="Exact host names that media URLs may name, at every hop; none given: all "
        "public hosts.",
    )
    allowed_private_networks: tuple[str, ...] = Field(
        (), description="CIDR block or host:port that is reachable although not public."
    )
    allowed_local_media_path: Path | None = Field(
        None, description="Folder below which file: URLs may point; none given: no file: URLs."
    )
    media_redirects: bool = Field(True, description="Follow redirects, each hop checked.")
    max_media_redirects: int = Field(10, ge=0, description="Most redirects of one fetch.")
    https_only: bool = Field(False, description="Refuse http: media URLs.")

    media_connector: str = Field("http", description="Which registered connector fetches media.")
    media_connector_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="JSON: options of a connector from elsewhere."
    )

    # -- how much and how long
    max_media_download_mb: float = Field(
        _FETCH.max_bytes / MIB, gt=0, description="Encoded size of one item, any scheme, in MiB."
    )
    image_fetch_timeout: float = Field(_FETCH.image_timeout_s, gt=0, description="Seconds.")
    video_fetch_timeout: float = Field(_FETCH.video_timeout_s, gt=0, description="Seconds.")
    audio_fetch_timeout: float = Field(_FETCH.audio_timeout_s, gt=0, description="Seconds.")
    media_idle_timeout: float = Field(
        _FETCH.idle_timeout_s, gt=0, description="Longest pause between two chunks, seconds."
    )
    media_fetch_max_retries: int = Field(
        _FETCH.max_retries, ge=1, description="Attempts in all for failures that can pass."
    )
    media_cache: Path | None = Field(
        None, description="Folder of the download cache; none given: off."
    )
    media_cache_max_size_mb: float = Field(_DISK.max_bytes / MIB, gt=0, description="MiB.")
    media_cache_ttl_hours: float = Field(_DISK.max_age_s / 3600, gt=0, description="Hours.")

    known_media: int = Field(
        _FETCH.max_known_payloads,
        ge=0,
        description="Local files and downloads on disk whose identity is remembered while they "
        "are unchanged: a hit on one reads nothing. As many base64 texts of 1 MiB or more, up to "
        "4,096: a hit on one decodes and digests nothing. 0: all are read each time.",
    )

    # -- decoding
    media_loading_thread_count: int = Field(8, ge=1, description="Threads of the media pool.")
    video_loader_backend: str = Field("pyav", description="Default video decoder.")
    trust_exif_image_id: bool = Field(
        False,
        description="Take an EXIF ImageID as an image's identity. The client controls it: only "
        "for a server with one tenant.",
    )
    max_image_pixels: int = Field(
        _DECODE.max_image_pixels, ge=0, description="Width times height; 0: no limit."
    )
    max_audio_clip_filesize_mb: float = Field(
        _DECODE.max_audio_clip_bytes / MIB, gt=0, description="Encoded audio, MiB."
    )
    max_audio_decode_duration: float = Field(
        _DECODE.max_audio_duration_s, gt=0, description="Seconds of audio per item."
    )
    max_audio_decode_mb: float = Field(
        _DECODE.max_audio_decoded_bytes / MIB, gt=0, description="Decoded audio per item, MiB."
    )
    max_video_frames: int = Field(
        _DECODE.max_video_frames, ge=1, description="Frames kept of one video."
    )
    max_video_decode_mb: float = Field(
        _DECODE.max_video_decoded_bytes / MIB,
        gt=0,
        description="RGB frames kept of one video, MiB.",
    )
    media_io_kwargs: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="JSON: decode options per modality."
    )

    # -- requests
    limit_mm_per_prompt: dict[str, int] = Field(
        default_factory=dict, description='JSON: items per modality, for example {"image": 8}.'
    )
    max_request_body_mb: float = Field(_REQUEST.max_body_bytes / MIB, gt=0, description="MiB.")
    max_request_body_stall: float = Field(
        _REQUEST.max_body_stall_s,
        gt=0,
        description="How far a body may fall behind 32 KiB per second, seconds; then 408.",
    )
    max_prompt_chars: int = Field(
        _REQUEST.max_prompt_chars,
        gt=0,
        description="Longest text of a request, in characters: its messages, tools or template "
        "variables, with 128 for each message, part and object; also most token ids.",
    )
    max_encoded_mb_per_request: float = Field(
        _REQUEST.max_encoded_bytes_per_request / MIB, gt=0, description="MiB of encoded media."
    )
    max_decoded_mb_per_request: float = Field(
        _REQUEST.max_decoded_bytes_per_request / MIB, gt=0, description="MiB of decoded media."
    )
    max_encoded_mb: float = Field(
        _REQUEST.max_encoded_bytes / MIB, gt=0, description="MiB of encoded media in all."
    )
    max_decoded_mb: float = Field(
        _REQUEST.max_decoded_bytes / MIB, gt=0, description="MiB of decoded media in all."
    )
    max_waiting_requests: int = Field(
        _REQUEST.max_waiting, ge=0, description="Requests that may wait; the next gets 503."
    )
    max_budget_wait: float = Field(
        _REQUEST.max_wait_s, gt=0, description="Longest wait for memory, seconds; then 503."
    )
    max_transcription_duration: float = Field(
        3600.0, gt=0, description="Longest recording that is transcribed, seconds."
    )
    transcription_chunk: float = Field(
        30.0,
        gt=0,
        description="Longest piece of a recording that the model gets at once, seconds; models "
        "with a shorter window get theirs.",
    )
    transcription_cut_search: float = Field(
        5.0,
        gt=0,
        description="A piece ends at the quietest place of its last so many seconds.",
    )
    max_render_time: float | None = Field(
        None,
        gt=0,
        description="Longest time in which a request must be rendered, fetching included, "
        "seconds; then 504. None given: no limit.",
    )
    enable_mm_embeds: bool = Field(
        False,
        description="Take embeddings in the place of media (image_embeds, video_embeds, "
        "audio_embeds); only from clients that are trusted to compute them.",
    )
    request_kwargs: bool = Field(
        True, description="Take media_io_kwargs and mm_processor_kwargs of a request."
    )

    # -- model, cache and engine
    trust_remote_code: bool = Field(False, description="Run code that a model folder ships.")
    chat_template: Path | None = Field(
        None,
        description="Jinja file with the chat template, for a model that has none or in the place "
        "of its own; none given: the model's.",
    )
    mm_processor_cache_gb: float = Field(4.0, ge=0, description="Processor cache, GiB; 0: off.")
    mm_processor_cache: str = Field("lru", description="Which registered processor cache is used.")
    processor_store: Path | None = Field(
        None,
        description="Folder below the processor cache: results stay from start to start, and are "
        "shared by all workers and replicas that have it. None given: there is no such store.",
    )
    processor_store_gb: float = Field(
        20.0, gt=0, description="Size of the processor store, GiB; least recently used first out."
    )
    mm_hasher_algorithm: Literal["sha256", "sha512", "blake3"] = Field(
        "sha256", description="Digest of identities in the processor cache."
    )
    mm_processor_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="JSON: options of the model's processor."
    )
    uuid_conflict: Literal["miss", "error"] = Field(
        "miss",
        description="Other media under a uuid that is known: miss processes them as items of "
        "their own, and the uuid alone stands for neither; error refuses them.",
    )
    processing_threads: int = Field(2, ge=1, description="Threads that run the model's processor.")
    worker_niceness: int = Field(
        10,
        ge=0,
        le=19,
        description="How far the threads and processes that decode and process step back behind "
        "the event loop, in steps of nice(2); Linux alone has it per thread.",
    )
    media_processes: int | None = Field(
        None,
        ge=0,
        le=256,
        description="Processes that decode and process items, divided among the front ends; 0: "
        "threads do it. None given: one per core where a front end has at least two. Needs Linux.",
    )
    media_decode_timeout: float = Field(
        120.0,
        gt=0,
        description="How long one item's decode, or its processing, may take, seconds; then 504. "
        "A process that works on it is replaced; a thread cannot be interrupted.",
    )
    raw_pixels: bool = Field(
        True,
        description="Hand over uint8 patches and leave rescale and normalize to the engine, for "
        "families where that is proven exact.",
    )
    proof_cache: Path | None = Field(
        None,
        description="Folder that keeps what was proven of a processor from start to start; none "
        "given: it is proven at each start.",
    )
    fused_preprocessing: bool = Field(
        False,
        description="Prepare pixels with kernels that numba compiles, for families that have them "
        "(kimi_k25); the results are the same. Needs the extra numba.",
    )
    engine: Literal["transformers", "none"] = Field(
        "transformers", description="none: render only, no weights."
    )
    device: str = Field("auto", description="cpu, cuda, cuda:N, or auto.")
    dtype: str = Field("auto", description="Model dtype; auto: what the model states.")
    max_model_len: int | None = Field(
        None, description="Longest prompt plus answer in tokens; none given: the model's."
    )
    engine_shared_memory: bool = Field(
        True, description="Hand large tensors to the engine through shared memory."
    )
    max_batch_size: int = Field(8, ge=1, description="Requests that the engine runs together.")

    # -- server
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port; 0: any free one.")
    served_model_name: tuple[str, ...] = Field(
        (), description="Names under which the model answers; none given: the path."
    )
    api_key: str | None = Field(None, description="Key that requests must bear; none given: open.")
    timeline_requests: int = Field(
        100, ge=0, description="Last requests whose timelines `/timeline` shows; 0: none."
    )
    workers: int = Field(
        1,
        ge=1,
        le=256,
        description="Front end processes behind the port, with one engine. The processor cache and "
        "the memory budgets are divided among them.",
    )
    worker_timeout: float = Field(
        60.0,
        ge=0,
        description="Of several front end processes: seconds after which one whose event loop "
        "stands still is killed and replaced; 0: never.",
    )
    warmup: bool = Field(
        True, description="Process one small item of each kind in the background after the start."
    )
    shutdown_grace: float = Field(
        30.0,
        ge=0,
        description="How long running requests may go on after a stop signal, seconds; then "
        "they are cancelled.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Log level."
    )

    @property
    def of_worker(self) -> Settings:
        """One worker's share: what is said for all is divided, but one request always fits."""
        count = self.workers
        processes = self.media_processes
        encoded = max(self.max_encoded_mb / count, self.max_encoded_mb_per_request)
        decoded = max(self.max_decoded_mb / count, self.max_decoded_mb_per_request)
        return self.model_copy(
            update={
                "mm_processor_cache_gb": self.mm_processor_cache_gb / count,
                "max_encoded_mb": min(encoded, self.max_encoded_mb),
                "max_decoded_mb": min(decoded, self.max_decoded_mb),
                "media_processes": processes and max(1, processes // count),
            }
        )

    @property
    def num_media_processes(self) -> int:
        """Worker processes of one front end."""
        if self.media_processes is not None:
            return self.media_processes
        if self.fused_preprocessing:  # its kernels use all cores by themselves
            return 0
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        share = cores // self.workers
        return share if share > 1 else 0

    @property
    def fetch_policy(self) -> FetchPolicy:
        """Which URLs may be fetched."""
        return FetchPolicy(
            allowed_domains=self.allowed_media_domains,
            allowed_private_networks=self.allowed_private_networks,
            allowed_local_media_path=self.allowed_local_media_path,
            allow_redirects=self.media_redirects,
            max_redirects=self.max_media_redirects,
            https_only=self.https_only,
        )

    @property
    def fetch_limits(self) -> FetchLimits:
        """How much and how long one fetch may take."""
        return FetchLimits(
            max_bytes=int(self.max_media_download_mb * MIB),
            image_timeout_s=self.image_fetch_timeout,
            video_timeout_s=self.video_fetch_timeout,
            audio_timeout_s=self.audio_fetch_timeout,
            idle_timeout_s=self.media_idle_timeout,
            max_retries=self.media_fetch_max_retries,
            max_known_payloads=self.known_media,
        )

    @property
    def download_cache_limits(self) -> DownloadCacheLimits:
        """Folder, size and age of the download cache."""
        return DownloadCacheLimits(
            folder=self.media_cache,
            max_bytes=int(self.media_cache_max_size_mb * MIB),
            max_age_s=self.media_cache_ttl_hours * 3600,
        )

    @property
    def decode_limits(self) -> DecodeLimits:
        """What one decode may produce."""
        return DecodeLimits(
            max_image_pixels=self.max_image_pixels,
            max_audio_clip_bytes=int(self.max_audio_clip_filesize_mb * MIB),
            max_audio_duration_s=self.max_audio_decode_duration,
            max_audio_decoded_bytes=int(self.max_audio_decode_mb * MIB),
            max_video_frames=self.max_video_frames,
            max_video_decoded_bytes=int(self.max_video_decode_mb * MIB),
        )

    @property
    def recording_limits(self) -> DecodeLimits:
        """What decoding one recording for a transcription may produce; its duration decides."""
        return replace(
            self.decode_limits,
            max_audio_duration_s=self.max_transcription_duration,
            max_audio_decoded_bytes=max(
                int(self.max_audio_decode_mb * MIB),
                int(self.max_transcription_duration * _RECORDING_BYTES_PER_S),
            ),
        )

    @property
    def request_limits(self) -> RequestLimits:
        """What one request, and all requests together, may hold."""
        return RequestLimits(
            max_items=dict(self.limit_mm_per_prompt),
            max_body_bytes=int(self.max_request_body_mb * MIB),
            max_body_stall_s=self.max_request_body_stall,
            max_prompt_chars=self.max_prompt_chars,
            # What can never be held is refused as one request's, which names the item.
            max_encoded_bytes_per_request=int(
                min(self.max_encoded_mb_per_request, self.max_encoded_mb) * MIB
            ),
            max_decoded_bytes_per_request=int(
                min(self.max_decoded_mb_per_request, self.max_decoded_mb) * MIB
            ),
            max_encoded_bytes=int(self.max_encoded_mb * MIB),
            max_decoded_bytes=int(self.max_decoded_mb * MIB),
            max_waiting=self.max_waiting_requests,
            max_wait_s=self.max_budget_wait,
        )


def load_settings(flags: Mapping[str, Any], *, config_file: Path | None = None) -> Settings:
    """Build the settings: flags win over the environment, which wins over the file.

    Args:
        flags: Field name -> value, only those that were given.
        config_file: TOML or JSON (by suffix) with field names as keys; dashes are underscores.

    Raises:
        ValueError: If a value is wrong or a key is unknown; pydantic's error names each.
    """
    values = {} if config_file is None else _read_config_file(config_file)

    class _WithFile(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, values)

    # A plain `Settings` again: it is sent to other processes, which know no local class.
    return Settings.model_construct(**dict(_WithFile(**flags)))


def _read_config_file(path: Path) -> dict[str, Any]:
    text = path.read_text("utf-8")
    try:
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as exc:
        raise ValueError(f"{path.name} cannot be read: {exc}") from exc
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} must hold an object of settings")
    return {str(key).replace("-", "_"): value for key, value in values.items()}
