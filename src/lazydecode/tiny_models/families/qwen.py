"""Qwen-VL, Qwen-Omni, and families that use their processors."""

from lazydecode.tiny_models.records import Family, Part
from lazydecode.tiny_models.turns import HERMES, QWEN, Slot

_HALF = [0.5, 0.5, 0.5]
_VISION_TOKENS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_IMAGE_SLOT = Slot("<|vision_start|><|image_pad|><|vision_end|>", "Picture {n}: ", "add_vision_id")
_VIDEO_SLOT = Slot("<|vision_start|><|video_pad|><|vision_end|>", "Video {n}: ", "add_vision_id")
_SLOTS = {"image": _IMAGE_SLOT, "video": _VIDEO_SLOT}

_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}
_IMAGE = Part("Qwen2VLImageProcessor", {"size": _SIZE})
_VIDEO = Part("Qwen2VLVideoProcessor", {"size": _SIZE})
_PATCH_16 = {"patch_size": 16, "image_mean": _HALF, "image_std": _HALF}
_QWEN3_IMAGE = Part(
    "Qwen2VLImageProcessor",
    {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, **_PATCH_16},
)
_QWEN3_VIDEO = Part(
    "Qwen3VLVideoProcessor",
    {"size": {"shortest_edge": 4096, "longest_edge": 25165824}, **_PATCH_16},
)
_OMNI_AUDIO = Part(
    "WhisperFeatureExtractor",
    {"feature_size": 128, "chunk_length": 300, "return_attention_mask": True},
)

# Sections of the rotary embedding over time, height and width: half of a head's 16 entries.
_MROPE = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 3, 3]}

FAMILIES = (
    Family(
        name="qwen2_vl",
        model_type="qwen2_vl",
        processor="Qwen2VLProcessor",
        turns=QWEN,
        image=_IMAGE,
        video=_VIDEO,
        tokens=_VISION_TOKENS,
        slots=_SLOTS,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        config={"text_config": {"rope_parameters": _MROPE}},
    ),
    Family(
        name="qwen2_5_vl",
        model_type="qwen2_5_vl",
        processor="Qwen2_5_VLProcessor",
        turns=QWEN,
        image=_IMAGE,
        video=_VIDEO,
        tokens=_VISION_TOKENS,
        slots=_SLOTS,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        config={
            "text_config": {"rope_parameters": _MROPE},
            "vision_config": {"out_hidden_size": 64, "fullatt_block_indexes": [1]},
        },
        dtype="bfloat16",
    ),
    Family(
        name="qwen3_vl",
        model_type="qwen3_vl",
        processor="Qwen3VLProcessor",
        turns=HERMES,
        image=_QWEN3_IMAGE,
        video=_QWEN3_VIDEO,
        tokens=_VISION_TOKENS,
        slots={"image": _IMAGE_SLOT, "video": Slot("<|video_pad|>")},
        eos="<|im_end|>",
        pad="<|endoftext|>",
        note="the processor wraps each frame; the template writes the bare video token",
    ),
    Family(
        name="qwen3_5",
        model_type="qwen3_5",
        processor="Qwen3VLProcessor",
        turns=HERMES,
        image=_QWEN3_IMAGE,
        video=_QWEN3_VIDEO,
        tokens=_VISION_TOKENS,
        slots=_SLOTS,
        eos="<|im_end|>",
        pad="<|endoftext|>",
    ),
    Family(
        name="qwen3_vl_moe",
        model_type="qwen3_vl_moe",
        processor="Qwen3VLProcessor",
        turns=HERMES,
        image=_QWEN3_IMAGE,
        video=_QWEN3_VIDEO,
        tokens=_VISION_TOKENS,
        slots={"image": _IMAGE_SLOT, "video": Slot("<|video_pad|>")},
        eos="<|im_end|>",
        pad="<|endoftext|>",
    ),
    Family(
        name="qwen3_5_moe",
        model_type="qwen3_5_moe",
        processor="Qwen3VLProcessor",
        turns=HERMES,
        image=_QWEN3_IMAGE,
        video=_QWEN3_VIDEO,
        tokens=_VISION_TOKENS,
        slots=_SLOTS,
        eos="<|im_end|>",
        pad="<|endoftext|>",
    ),
    Family(
        name="lfm3_vl",
        model_type="lfm3_vl",
        processor="Lfm3VlProcessor",
        image=_QWEN3_IMAGE,
        video=_QWEN3_VIDEO,
        tokens=_VISION_TOKENS,
        slots={"image": _IMAGE_SLOT, "video": Slot("<|video_pad|>")},
        eos="<|im_end|>",
        pad="<|endoftext|>",
    ),
    Family(
        name="qwen2_5_omni",
        model_type="qwen2_5_omni",
        processor="Qwen2_5OmniProcessor",
        image=_IMAGE,
        video=_VIDEO,
        audio=_OMNI_AUDIO,
        named_tokens={
            "image_token": "<|IMAGE|>",
            "audio_token": "<|AUDIO|>",
            "video_token": "<|VIDEO|>",
            "vision_bos_token": "<|vision_bos|>",
            "vision_eos_token": "<|vision_eos|>",
            "audio_bos_token": "<|audio_bos|>",
            "audio_eos_token": "<|audio_eos|>",
        },
        slots={
            "image": Slot("<|vision_bos|><|IMAGE|><|vision_eos|>"),
            "video": Slot("<|vision_bos|><|VIDEO|><|vision_eos|>"),
            "audio": Slot("<|audio_bos|><|AUDIO|><|audio_eos|>"),
        },
        eos="<|im_end|>",
        pad="<|endoftext|>",
        config={
            "enable_audio_output": False,
            "thinker_config": {
                "vision_start_token_id": None,
                "text_config": {"rope_parameters": _MROPE},
            },
        },
        token_settings={
            "vision_start_token_id": "<|vision_bos|>",
            "audio_start_token_id": "<|audio_bos|>",
        },
        voices_file="spk_dict.pt",
    ),
    Family(
        name="qwen3_omni_moe",
        model_type="qwen3_omni_moe",
        processor="Qwen3OmniMoeProcessor",
        turns=HERMES,
        image=Part("Qwen2VLImageProcessor", {"size": _SIZE, **_PATCH_16}),
        video=Part("Qwen2VLVideoProcessor", {"size": _SIZE, **_PATCH_16}),
        audio=_OMNI_AUDIO,
        named_tokens={
            "image_token": "<|image_pad|>",
            "audio_token": "<|audio_pad|>",
            "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
        slots={
            "image": Slot("<|vision_start|><|image_pad|><|vision_end|>"),
            "video": Slot("<|vision_start|><|video_pad|><|vision_end|>"),
            "audio": Slot("<|audio_start|><|audio_pad|><|audio_end|>"),
        },
        eos="<|im_end|>",
        pad="<|endoftext|>",
        config={
            "enable_audio_output": False,
            "thinker_config": {
                "vision_start_token_id": None,
                "text_config": {"rope_parameters": _MROPE},
            },
        },
    ),
    Family(
        name="exaone4_5",
        model_type="exaone4_5",
        processor="Exaone4_5_Processor",
        image=_IMAGE,
        video=_VIDEO,
        tokens=_VISION_TOKENS,
        slots=_SLOTS,
    ),
    Family(
        name="hyperclovax_vision_v2",
        model_type="hyperclovax_vision_v2",
        processor="HyperCLOVAXVisionV2Processor",
        image=_IMAGE,
        video=_VIDEO,
        tokens=_VISION_TOKENS,
        slots=_SLOTS,
    ),
    Family(
        name="video_llama_3",
        model_type="video_llama_3",
        processor="VideoLlama3Processor",
        image=Part("VideoLlama3ImageProcessor"),
        video=Part("VideoLlama3VideoProcessor"),
        tokens=_VISION_TOKENS,
        slots={"image": Slot("<|image_pad|>"), "video": Slot("<|video_pad|>")},
        eos="<|im_end|>",
        pad="<|endoftext|>",
        config={"vision_config": {"patch_size": 14}},
    ),
    Family(
        name="cosmos3_edge",
        model_type="cosmos3_edge",
        processor="Cosmos3EdgeProcessor",
        image=Part("Cosmos3EdgeImageProcessor"),
        video=Part("Cosmos3EdgeVideoProcessor"),
        tokens=_VISION_TOKENS,
        slots=_SLOTS,
        eos="<|im_end|>",
        pad="<|endoftext|>",
    ),
)
