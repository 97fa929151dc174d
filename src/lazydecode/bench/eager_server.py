"""The render route in today's way, for comparison: `python -m lazydecode.bench.eager_server`.

A body is parsed with json; media are decoded when they are fetched, on a pool of threads; items
are identified by their decoded content; one worker runs the processor. Decoders, template,
tokenizer, processor and cache are the same as on the other side.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lazydecode.bench import lazy
from lazydecode.bench.scenarios import RENDER
from lazydecode.config import load_settings
from lazydecode.engine.wire import encode_item
from lazydecode.inputs import MultiModalInput
from lazydecode.media.base import MediaIO
from lazydecode.models.loading import load_model_frontend
from lazydecode.processing.inputs import ProcessorInputs

_MODALITIES = {"image_url": "image", "video_url": "video", "audio_url": "audio"}


class EagerRenderer:
    """Answers render requests."""

    def __init__(self, model: str) -> None:
        torch.set_num_threads(1)
        # Raw pixels are not today's practice: the processor runs to its end.
        self._frontend = load_model_frontend(model, load_settings({"raw_pixels": False}))
        processor = self._frontend.mm_processor
        if processor is None:
            raise ValueError(f"{model} takes no media")
        self._processor = processor
        self._media_ios: dict[str, MediaIO[Any]] = {
            modality: self._frontend.info.get_media_io(modality)
            for modality in self._frontend.modalities
        }
        self._cache = lazy.new_cache()
        self._decoders = ThreadPoolExecutor(8)
        self._worker = ThreadPoolExecutor(1)

    async def render(self, request: Request) -> Response:
        """One answer: token ids, identities, and tensors unless they are not wanted."""
        body = json.loads(await request.body())
        loop = asyncio.get_running_loop()
        messages: list[dict[str, Any]] = []
        pending: dict[str, list[Any]] = {}
        for message in body["messages"]:
            if isinstance(message["content"], str):
                messages.append(message)
                continue
            parts = []
            for part in message["content"]:
                modality = _MODALITIES.get(part["type"])
                if modality is None:
                    parts.append(part)
                    continue
                url = part[part["type"]]["url"]
                data = base64.b64decode(url.partition(",")[2])
                decode = self._media_ios[modality].load_bytes
                job = loop.run_in_executor(self._decoders, decode, data)
                pending.setdefault(modality, []).append(job)
                parts.append({"type": modality})
            messages.append({**message, "content": parts})
        media = {modality: await asyncio.gather(*jobs) for modality, jobs in pending.items()}
        prompt = self._frontend.render_chat(messages).prompt
        rendered = await loop.run_in_executor(self._worker, self._process, prompt, media)
        answer = {
            "token_ids": rendered["prompt_token_ids"],
            "mm_hashes": rendered["mm_hashes"],
            "kwargs_data": None,
        }
        if body.get("mm_payload") != "none":
            answer["kwargs_data"] = {
                modality: [
                    base64.b64encode(encode_item(item, dtype=torch.float16)).decode()
                    for item in items
                    if item is not None
                ]
                for modality, items in rendered["mm_kwargs"].items()
            }
        return JSONResponse(answer)

    def _process(self, prompt: str | list[int], media: dict[str, Any]) -> MultiModalInput:
        inputs = ProcessorInputs(
            prompt,
            self._frontend.info.parse_mm_data(media, validate=False),
            cache=self._cache,
            processor_fingerprint=self._frontend.fingerprint,
        )
        return self._processor.apply(inputs)


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


def main(model: str, port: int) -> None:
    """Serve `model` on `port` until a signal."""
    renderer = EagerRenderer(model)
    app = Starlette(
        routes=[
            Route(RENDER, renderer.render, methods=["POST"]),
            Route("/health", _health, methods=["GET"]),
        ]
    )
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", loop="uvloop")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
