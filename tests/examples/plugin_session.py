"""Run by `test_plugin_package`, in a process that has the example package on its import path.

Serves a model with the package's parts, sends it requests, and prints what came of them as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from lazydecode.cache.contained import ContainedCache
from tests.builders import make_png
from tests.builders_video import make_mp4
from tests.server.harness import Server, data_url, image, request, text, video

MIB_IN_GIB = 1 / 1024
LARGE = (640, 480)
"""Over an eighth of a cache of one MiB, as patches; the small image is far below it."""


def main(model: Path, folder: Path) -> None:
    assert not any(name.startswith("lazydecode_example") for name in sys.modules)
    (folder / "photos" / "deep").mkdir(parents=True)
    (folder / "other").mkdir()
    (folder / "photos" / "deep" / "a cat.png").write_bytes(make_png())
    (folder / "photos" / "empty.png").write_bytes(b"")
    (folder / "photos" / "large.png").write_bytes(make_png(LARGE))
    (folder / "other" / "cat.png").write_bytes(make_png())
    (folder / "photos" / "out.png").symlink_to(folder / "other" / "cat.png")
    with Server(
        model,
        served_model_name=("m",),
        media_connector="bucket",
        media_connector_kwargs={"folder": str(folder), "buckets": ["photos"]},
        mm_processor_cache="small-items",
        mm_processor_cache_gb=MIB_IN_GIB,
        max_model_len=4096,
    ) as server:
        json.dump(report(server), sys.stdout)


def report(server: Server) -> dict[str, Any]:
    return {
        "parts": {
            "connector": type(server.context.renderer._connector).__name__,
            "sender": sender_name(server),
        },
        "rendered": {
            "bucket": ids(server, image("bucket://photos/deep/a%20cat.png")),
            "data": ids(server, image(data_url(make_png(), "image/png"))),
        },
        "refused": {
            url: refusal(server, image(url))
            for url in (
                "bucket://photos/none.png",
                "bucket://photos/empty.png",
                "bucket://photos/../other/cat.png",
                "bucket://photos/%2e%2e/other/cat.png",
                "bucket://photos/out.png",
                "bucket://other/cat.png",
                "bucket://photos",
                "file:///etc/hostname",
            )
        },
        "three_images": refusal(server, *[image("bucket://photos/deep/a%20cat.png")] * 3),
        "head": head(server),
        "unknown_backend": refusal(
            server,
            video(data_url(make_mp4(), "video/mp4")),
            media_io_kwargs={"video": {"video_backend": "vhs"}},
        ),
        "caches": caches(server),
    }


def sender_name(server: Server) -> str:
    sender = server.context.renderer.sender_cache
    assert isinstance(sender, ContainedCache)
    return type(sender.inner).__name__


def ids(server: Server, *parts: dict[str, Any]) -> list[int]:
    answer = server.render(request(*parts, text(), model="m", mm_payload="none"))
    assert answer.status_code == 200, answer.text
    prompt: list[int] = answer.json()["token_ids"]
    return prompt


def refusal(server: Server, *parts: dict[str, Any], **fields: Any) -> tuple[int, str]:
    answer = server.render(request(*parts, text(), model="m", **fields))
    return answer.status_code, answer.json().get("error", {}).get("message", "")


def head(server: Server) -> list[int]:
    """The frames that the backend takes, as the video decoder knows it by name."""
    from lazydecode.media import ImageMediaIO, VideoMediaIO

    decoder = VideoMediaIO(ImageMediaIO(), video_backend="head", num_frames=3)
    frames, metadata = decoder.load_bytes(make_mp4(20))
    assert len(frames) == 3
    rendered = server.render(
        request(
            video(data_url(make_mp4(), "video/mp4")),
            model="m",
            media_io_kwargs={"video": {"video_backend": "head", "num_frames": 4}},
        )
    )
    assert rendered.status_code == 200, rendered.text
    indices: list[int] = metadata["frames_indices"]
    return indices


def caches(server: Server) -> dict[str, Any]:
    """Generate for a small and a large image, twice; what both ends of the mirror then hold."""
    texts = []
    for name in ("deep/a%20cat.png", "large.png") * 2:
        answer = server.post(
            "/v1/chat/completions",
            request(
                image(f"bucket://photos/{name}"), text(), model="m", max_tokens=3, temperature=0
            ),
        )
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"][0]["message"]["content"])
    engine = asyncio.run_coroutine_threadsafe(
        server.context.engine.cache_snapshot_async(), server.loop
    ).result(120)
    sender = server.context.renderer.sender_cache
    assert sender is not None
    return {
        "sender": sender.snapshot(),
        "engine": engine,
        "hits": sender.make_stats().hits,
        "entries_metric": server.metric("cache_entries", cache="sender"),
        "texts": texts,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
