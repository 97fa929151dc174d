"""Qwen-VL and families that use its processors."""

from lazydecode.tiny_models.records import Family, Part
from lazydecode.tiny_models.turns import QWEN, Slot

_VISION_TOKENS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_SLOTS = {
    "image": Slot("<|vision_start|><|image_pad|><|vision_end|>", "Picture {n}: ", "add_vision_id"),
    "video": Slot("<|vision_start|><|video_pad|><|vision_end|>", "Video {n}: ", "add_vision_id"),
}
_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}
_IMAGE = Part("Qwen2VLImageProcessor", {"size": _SIZE})
_VIDEO = Part("Qwen2VLVideoProcessor", {"size": _SIZE})
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
)
