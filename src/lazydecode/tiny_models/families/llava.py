"""LLaVA and families built like it."""

from lazydecode.tiny_models.records import Family, Part
from lazydecode.tiny_models.turns import BARE, LLAMA3, MISTRAL, VICUNA, Slot

_HALF = [0.5, 0.5, 0.5]
_CLIP_336 = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
# 24 x 24 patches; the class token, which the processor counts, is cut off.
_CLIP_TOKENS = {
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}

FAMILIES = (
    Family(
        name="llava",
        model_type="llava",
        processor="LlavaProcessor",
        turns=VICUNA,
        image=Part(
            "CLIPImageProcessor",
            _CLIP_336,
        ),
        processor_options=_CLIP_TOKENS,
        tokens=("<image>",),
        slots={"image": Slot("<image>\n")},
        bos="<s>",
        eos="</s>",
        pad="<pad>",
    ),
    Family(
        name="llava_next",
        model_type="llava_next",
        processor="LlavaNextProcessor",
        turns=MISTRAL,
        image=Part(
            "LlavaNextImageProcessor",
            _CLIP_336,
        ),
        processor_options=_CLIP_TOKENS,
        tokens=("<image>",),
        slots={"image": Slot("<image>\n")},
        bos="<s>",
        eos="</s>",
        pad="<pad>",
    ),
    Family(
        name="llava_next_video",
        model_type="llava_next_video",
        processor="LlavaNextVideoProcessor",
        turns=VICUNA,
        image=Part(
            "LlavaNextImageProcessor",
            _CLIP_336,
        ),
        video=Part(
            "LlavaNextVideoVideoProcessor",
            _CLIP_336,
        ),
        processor_options=_CLIP_TOKENS,
        tokens=("<image>", "<video>"),
        slots={"image": Slot("<image>\n"), "video": Slot("<video>\n")},
        bos="<s>",
        eos="</s>",
        pad="<pad>",
    ),
    Family(
        name="llava_onevision",
        model_type="llava_onevision",
        processor="LlavaOnevisionProcessor",
        image=Part("LlavaOnevisionImageProcessor"),
        video=Part("LlavaOnevisionVideoProcessor"),
        processor_options={"num_image_tokens": 729, "vision_feature_select_strategy": "full"},
        tokens=("<image>", "<video>"),
        slots={"image": Slot("<image>\n"), "video": Slot("<video>\n")},
    ),
    Family(
        name="video_llava",
        model_type="video_llava",
        processor="VideoLlavaProcessor",
        turns=VICUNA,
        image=Part("VideoLlavaImageProcessor"),
        video=Part("VideoLlavaVideoProcessor"),
        processor_options=_CLIP_TOKENS,
        tokens=("<image>", "<video>"),
        slots={"image": Slot("<image>\n"), "video": Slot("<video>\n")},
        bos="<s>",
        eos="</s>",
        pad="<pad>",
    ),
    Family(
        name="granite4_vision",
        model_type="granite4_vision",
        processor="Granite4VisionProcessor",
        turns=BARE,
        image=Part(
            "LlavaNextImageProcessor",
            {
                "size": {"height": 384, "width": 384},
                "crop_size": {"height": 384, "width": 384},
                "image_grid_pinpoints": [[384, 384], [384, 768], [768, 384], [768, 768]],
                "image_mean": _HALF,
                "image_std": _HALF,
            },
        ),
        processor_options={
            "patch_size": 16,
            "vision_feature_select_strategy": "full",
            "num_additional_image_tokens": 0,
            "downsample_rate": "4/8",
        },
        tokens=("<image>",),
        slots={"image": Slot("<image>\n")},
        config={
            "downsample_rate": "4/8",
            "deepstack_layer_map": [[-1, 0]],
            "spatial_target_layers": [0, 0, 1, 1],
            "vision_feature_select_strategy": "full",
            "image_grid_pinpoints": [[384, 384], [384, 768], [768, 384], [768, 768]],
            "vision_config": {
                "model_type": "siglip_vision_model",
                "image_size": 384,
                "patch_size": 16,
                "vision_use_head": False,
            },
        },
    ),
    Family(
        name="perception_lm",
        model_type="perception_lm",
        processor="PerceptionLMProcessor",
        turns=LLAMA3,
        image=Part("PerceptionLMImageProcessor"),
        video=Part("PerceptionLMVideoProcessor"),
        processor_options={"patch_size": 14, "pooling_ratio": 2},
        named_tokens={"image_token": "<|image|>", "video_token": "<|video|>"},
        slots={"image": Slot("<|image|>"), "video": Slot("<|video|>")},
        bos="<|begin_of_text|>",
        eos="<|end_of_text|>",
        no_weights="its vision tower is built with timm",
    ),
)
