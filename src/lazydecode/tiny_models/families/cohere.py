"""Aya Vision, Command A Vision and Compass."""

from lazydecode.tiny_models.records import Family, Part
from lazydecode.tiny_models.turns import COHERE, Slot

_HALF = [0.5, 0.5, 0.5]

FAMILIES = (
    Family(
        name="aya_vision",
        model_type="aya_vision",
        processor="AyaVisionProcessor",
        turns=COHERE,
        image=Part(
            "GotOcr2ImageProcessor",
            {
                "size": {"height": 364, "width": 364},
                "image_mean": _HALF,
                "image_std": _HALF,
            },
        ),
        processor_options={"patch_size": 14, "img_size": 364, "downsample_factor": 2},
        tokens=(
            "<image>",
            "<|START_OF_IMG|>",
            "<|END_OF_IMG|>",
            "<|IMG_PATCH|>",
            "<|IMG_LINE_BREAK|>",
            "TILE_GLOBAL",
            *(f"TILE_{tile}" for tile in range(1, 13)),
            "TILE",
        ),
        slots={"image": Slot("<image>")},
        bos="<BOS_TOKEN>",
        eos="<|END_OF_TURN_TOKEN|>",
        config={"vision_config": {"image_size": 364}},
    ),
    Family(
        name="cohere2_vision",
        model_type="cohere2_vision",
        processor="Cohere2VisionProcessor",
        turns=COHERE,
        image=Part("Cohere2VisionImageProcessor", {"patch_size": 16}),
        named_tokens={
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "image_token": "<|IMG_PATCH|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
        slots={"image": Slot("<|IMG_PATCH|>")},
        bos="<BOS_TOKEN>",
        eos="<|END_OF_TURN_TOKEN|>",
    ),
    Family(
        name="cohere_compass",
        model_type="cohere_compass",
        processor="CohereCompassProcessor",
        turns=COHERE,
        image=Part("CohereCompassImageProcessor", {"patch_size": 16}),
        video=Part("CohereCompassVideoProcessor"),
        tokens=("<|IMAGE_PAD|>", "<|VIDEO_PAD|>", "<|VISION_START|>", "<|VISION_END|>"),
        slots={
            "image": Slot("<|VISION_START|><|IMAGE_PAD|><|VISION_END|>"),
            "video": Slot("<|VIDEO_PAD|>"),
        },
        config={
            "text_config": {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 10000.0}
                }
            }
        },
    ),
)
