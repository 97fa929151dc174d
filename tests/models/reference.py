"""The model's own Hugging Face processor on a whole request: what ours is compared with.

Nothing of ours is in it: its own tokenizer, its own expansion, all items in one call.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import soundfile
import torch
from PIL import Image

TEXT_NAMES = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}

SCALAR_METADATA = {"NemotronH_Omni_Reasoning_V3Processor"}
"""Classes that take the metadata of one video instead of a list."""


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture with ramps and a little noise: cheap at any size, different per seed."""
    rows = (np.arange(height, dtype=np.uint16)[:, None] * 3 + 17 * seed) % 256
    columns = (np.arange(width, dtype=np.uint16)[None, :] * 5 + 29 * seed) % 256
    pixels = np.empty((height, width, 3), dtype=np.uint8)
    pixels[..., 0], pixels[..., 1] = rows, columns
    pixels[..., 2] = (rows + columns) // 2
    noise = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    pixels[:8, :8] = noise[: pixels[:8, :8].shape[0], : pixels[:8, :8].shape[1]]
    return Image.fromarray(pixels)


def clip(frames: int, width: int, height: int, *, fps: float = 12.0, step: int = 6) -> Any:
    """Frames of a video of which every `step`-th was taken, and its metadata."""
    pixels = np.stack([np.asarray(picture(width, height, seed=n)) for n in range(frames)])
    metadata = {
        "fps": fps,
        "duration": frames * step / fps,
        "total_num_frames": frames * step,
        "frames_indices": [n * step for n in range(frames)],
        "video_backend": "pyav",
        "timestamps": [n * step / fps for n in range(frames)],
        "do_sample_frames": False,
        "width": width,
        "height": height,
    }
    return pixels, metadata


def sound(seconds: float, rate: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A tone with noise."""
    count = int(seconds * rate)
    noise = np.random.default_rng(seed).standard_normal(count) * 0.02
    tone = 0.3 * np.sin(np.arange(count) * (0.05 + 0.01 * seed))
    return (tone + noise).astype(np.float32)


class Reference:
    """One model's own processor.

    Args:
        folder: The model.
    """

    def __init__(self, folder: str) -> None:
        from transformers import AutoProcessor

        self.processor = AutoProcessor.from_pretrained(folder)
        audio = getattr(self.processor, "audio_processor", None) or getattr(
            self.processor, "feature_extractor", None
        )
        self.rate: int = getattr(audio, "sampling_rate", 16000)

    @classmethod
    def of(cls, folder: str) -> Reference:
        """The reference of a model whose class may be called in a way of its own."""
        reference = cls(folder)
        if type(reference.processor).__name__ == "VoxtralProcessor":
            return VoxtralReference(folder)
        return reference

    def text(self, messages: Sequence[Mapping[str, Any]]) -> Any:
        """The prompt of a conversation, by the class's own method."""
        template = getattr(self.processor, "chat_template", None)
        owner = self.processor if template else self.processor.tokenizer
        rendered = owner.apply_chat_template(
            [dict(m) for m in messages], add_generation_prompt=True, tokenize=False
        )
        return str(rendered)

    def __call__(
        self, text: Any, items: Mapping[str, Sequence[Any]], **options: Any
    ) -> dict[str, Any]:
        """The class's outputs for a whole request."""
        arguments: dict[str, Any] = {"return_tensors": "pt", **options}
        bos = getattr(self.processor.tokenizer, "bos_token", None)
        if bos and text.startswith(bos):
            arguments["add_special_tokens"] = False
        if items.get("image"):
            arguments["images"] = list(items["image"])
        if items.get("video"):
            known = ("total_num_frames", "fps", "width", "height", "duration", "frames_indices")
            arguments["videos"] = [frames for frames, _ in items["video"]]
            arguments["video_metadata"] = [{k: m[k] for k in known} for _, m in items["video"]]
            if type(self.processor).__name__ in SCALAR_METADATA:
                from transformers.video_utils import VideoMetadata

                arguments["video_metadata"] = VideoMetadata(**arguments["video_metadata"][0])
            arguments |= {"do_sample_frames": False, "return_metadata": True}
        if items.get("audio"):
            arguments["audio"] = list(items["audio"])
            arguments["sampling_rate"] = self.rate
        return dict(self.processor(text=[text], **arguments))

    def ids(self, text: Any, items: Mapping[str, Sequence[Any]]) -> list[int]:
        """The token ids of a whole request."""
        return [int(i) for i in self(text, items)["input_ids"][0]]

    def tensors(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Those outputs that belong to items."""
        length = len(outputs["input_ids"][0])
        return {
            name: value
            for name, value in outputs.items()
            if name not in TEXT_NAMES
            and name != "video_metadata"
            and not (isinstance(value, torch.Tensor) and tuple(value.shape[:2]) == (1, length))
        }


class VoxtralReference(Reference):
    """A class that writes prompts of conversations whose recordings it reads itself."""

    def text(self, messages: Sequence[Mapping[str, Any]]) -> Any:
        """The conversation: there is no text of it."""
        return messages

    def __call__(
        self, text: Any, items: Mapping[str, Sequence[Any]], **options: Any
    ) -> dict[str, Any]:
        """The class's outputs for a whole request."""
        sounds = iter(items.get("audio", ()))
        messages = [
            {**m, "content": [self._part(p, sounds) for p in m["content"]]}
            if isinstance(m["content"], list)
            else m
            for m in text
        ]
        return dict(self.processor.apply_chat_template(messages, **options))

    def _part(self, part: Mapping[str, Any], sounds: Iterator[Any]) -> dict[str, Any]:
        if part["type"] != "audio":
            return dict(part)
        buffer = io.BytesIO()
        soundfile.write(buffer, next(sounds), self.rate, format="WAV", subtype="FLOAT")
        return {"type": "audio", "base64": base64.b64encode(buffer.getvalue()).decode()}
