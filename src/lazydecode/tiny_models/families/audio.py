"""Families that take audio and no images."""

from lazydecode.tiny_models.records import Family, Part
from lazydecode.tiny_models.turns import QWEN, Slot

_WHISPER_128 = Part("WhisperFeatureExtractor", {"feature_size": 128})

FAMILIES = (
    Family(
        name="qwen2_audio",
        model_type="qwen2_audio",
        processor="Qwen2AudioProcessor",
        turns=QWEN,
        audio=_WHISPER_128,
        tokens=("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        slots={"audio": Slot("<|audio_bos|><|AUDIO|><|audio_eos|>\n", "Audio {n}: ")},
        eos="<|im_end|>",
        pad="<|endoftext|>",
    ),
)
