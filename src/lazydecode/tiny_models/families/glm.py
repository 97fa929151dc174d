"""GLM-4V and other families that mark media by begin and end tokens."""

from lazydecode.tiny_models.records import Family, Part
from lazydecode.tiny_models.turns import BARE, GLM, KIMI, Slot

_BORDERS = {
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
"""Settings of the models: ids of the tokens around pictures and videos."""

FAMILIES = (
    Family(
        name="glm4v",
        model_type="glm4v",
        processor="Glm4vProcessor",
        turns=GLM,
        image=Part("Glm4vImageProcessor"),
        video=Part("Glm4vVideoProcessor"),
        tokens=(
            "<|image|>",
            "<|video|>",
            "<|begin_of_image|>",
            "<|end_of_image|>",
            "<|begin_of_video|>",
            "<|end_of_video|>",
        ),
        slots={
            "image": Slot("<|begin_of_image|><|image|><|end_of_image|>"),
            "video": Slot("<|begin_of_video|><|video|><|end_of_video|>"),
        },
        config={"text_config": {"rope_parameters": {"mrope_section": [2, 3, 3]}}},
        token_settings=_BORDERS,
    ),
    Family(
        name="glm4v_moe",
        model_type="glm4v_moe",
        processor="Glm4vProcessor",
        turns=GLM,
        image=Part("Glm4vImageProcessor"),
        video=Part("Glm4vVideoProcessor"),
        tokens=(
            "<|image|>",
            "<|video|>",
            "<|begin_of_image|>",
            "<|end_of_image|>",
            "<|begin_of_video|>",
            "<|end_of_video|>",
        ),
        slots={
            "image": Slot("<|begin_of_image|><|image|><|end_of_image|>"),
            "video": Slot("<|begin_of_video|><|video|><|end_of_video|>"),
        },
        config={"text_config": {"rope_parameters": {"mrope_section": [1, 1, 2]}}},
        note="GLM-4.5V",
        token_settings=_BORDERS,
    ),
    Family(
        name="glm46v",
        model_type="glm46v",
        processor="Glm46VProcessor",
        turns=GLM,
        image=Part("Glm46VImageProcessor"),
        video=Part("Glm46VVideoProcessor"),
        tokens=(
            "<|image|>",
            "<|video|>",
            "<|begin_of_image|>",
            "<|end_of_image|>",
            "<|begin_of_video|>",
            "<|end_of_video|>",
        ),
        slots={
            "image": Slot("<|begin_of_image|><|image|><|end_of_image|>"),
            "video": Slot("<|begin_of_video|><|video|><|end_of_video|>"),
        },
        config={"text_config": {"rope_parameters": {"mrope_section": [2, 3, 3]}}},
        token_settings=_BORDERS,
    ),
    Family(
        name="glm5_next",
        model_type="glm5_next",
        processor="Glm5NextProcessor",
        turns=GLM,
        image=Part("Glm5NextImageProcessor"),
        video=Part("Glm5NextVideoProcessor"),
        tokens=(
            "<|image|>",
            "<|video|>",
            "<|begin_of_image|>",
            "<|end_of_image|>",
            "<|begin_of_video|>",
            "<|end_of_video|>",
        ),
        slots={
            "image": Slot("<|begin_of_image|><|image|><|end_of_image|>"),
            "video": Slot("<|begin_of_video|><|video|><|end_of_video|>"),
        },
        config={"text_config": {"num_key_value_heads": 4}},
        token_settings=_BORDERS,
    ),
    Family(
        name="kimi_k25",
        model_type="kimi_k25",
        processor="Kimi_K25Processor",
        turns=KIMI,
        image=Part("Kimi_K25ImageProcessor", {"size": {"max_height": 7168, "max_width": 7168}}),
        video=Part("Kimi_K25VideoProcessor", {"size": {"max_height": 7168, "max_width": 7168}}),
        tokens=(
            "<|media_begin|>",
            "<|media_content|>",
            "<|media_pad|>",
            "<|media_end|>",
            "<|kimi_k25_video_placeholder|>",
        ),
        slots={
            "image": Slot("<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"),
            "video": Slot("<|kimi_k25_video_placeholder|>"),
        },
        config={
            "projection_hidden_size": 64,
            "use_unified_vision_chunk": True,
            "text_config": {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1},
        },
    ),
    Family(
        name="ernie4_5_vl_moe",
        model_type="ernie4_5_vl_moe",
        processor="Ernie4_5_VLMoeProcessor",
        turns=BARE,
        image=Part("Ernie4_5_VLMoeImageProcessor"),
        video=Part("Ernie4_5_VLMoeVideoProcessor", {"draw_on_frames": False}),
        named_tokens={
            "image_token": "<|IMAGE_PLACEHOLDER|>",
            "image_start_token": "<|IMAGE_START|>",
            "image_end_token": "<|IMAGE_END|>",
            "video_token": "<|VIDEO_PLACEHOLDER|>",
            "video_start_token": "<|VIDEO_START|>",
            "video_end_token": "<|VIDEO_END|>",
        },
        slots={
            "image": Slot("Picture 1:<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"),
            "video": Slot("Video 1:<|VIDEO_START|><|VIDEO_PLACEHOLDER|><|VIDEO_END|>"),
        },
        config={
            "text_config": {
                "rope_parameters": {"mrope_section": [3, 3, 2]},
                "moe_num_experts": 4,
                "moe_k": 2,
                "moe_intermediate_size": [64, 32],
            }
        },
    ),
    Family(
        name="minimax_m3_vl",
        model_type="minimax_m3_vl",
        processor="MiniMaxM3VLProcessor",
        image=Part("MiniMaxM3VLImageProcessor"),
        video=Part("MiniMaxM3VLVideoProcessor"),
        tokens=("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>["),
        slots={"image": Slot("]<]image[>["), "video": Slot("]<]video[>[")},
    ),
)
