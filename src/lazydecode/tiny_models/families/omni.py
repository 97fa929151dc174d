"""Families that take images and audio."""

from lazydecode.tiny_models.records import Family, Part
from lazydecode.tiny_models.turns import PHI, Slot

FAMILIES = (
    Family(
        name="phi4_multimodal",
        model_type="phi4_multimodal",
        processor="Phi4MultimodalProcessor",
        turns=PHI,
        image=Part("Phi4MultimodalImageProcessor"),
        audio=Part("Phi4MultimodalFeatureExtractor"),
        audio_argument="audio_processor",
        named_tokens={"image_token": "<|endoftext10|>", "audio_token": "<|endoftext11|>"},
        slots={"image": Slot("<|endoftext10|>"), "audio": Slot("<|endoftext11|>")},
        config={
            "audio_config": {
                "ext_pw_out_channel": 64,
                "depthwise_separable_out_channel": 64,
                "nemo_conv_channels": 64,
                "num_blocks": 2,
            }
        },
    ),
    Family(
        name="nemotron_h_omni",
        model_type="nemotron_h_omni",
        processor="NemotronH_Omni_Reasoning_V3Processor",
        image=Part("NemotronH_Omni_Reasoning_V3ImageProcessor"),
        video=Part(
            "NemotronH_Omni_Reasoning_V3VideoProcessor",
            {
                "norm_mean": [0.48145466, 0.4578275, 0.40821073],
                "norm_std": [0.26862954, 0.26130258, 0.27577711],
            },
        ),
        audio=Part("ParakeetFeatureExtractor", {"feature_size": 128}),
        tokens=(
            "<image>",
            "<video>",
            "<so_embedding>",
            "<so_start>",
            "<so_end>",
            "<img>",
            "</img>",
        ),
        slots={
            "image": Slot("<image>\n"),
            "video": Slot("<video>\n"),
            "audio": Slot("<so_embedding>\n"),
        },
        config={
            "vision_hidden_size": 64,
            "projector_hidden_size": 64,
            "vision_config": {"max_img_size": 2048},
            "audio_config": {
                "model_type": "parakeet_encoder",
                "num_mel_bins": 128,
                "projection_hidden_size": 64,
                "projection_bias": False,
            },
            "text_config": {
                "mamba_num_heads": 8,
                "mamba_head_dim": 16,
                "ssm_state_size": 16,
                "n_groups": 2,
                "moe_intermediate_size": 64,
                "moe_shared_expert_intermediate_size": 64,
            },
        },
        token_settings={
            "image_token_id": "<image>",
            "video_token_id": "<video>",
            "audio_token_id": "<so_embedding>",
        },
    ),
    Family(
        name="inkling",
        model_type="inkling_mm_model",
        processor="InklingProcessor",
        image=Part("InklingImageProcessor"),
        audio=Part("InklingFeatureExtractor"),
        tokens=(
            "<|unused_200054|>",
            "<|unused_200053|>",
            "<|content_image|>",
            "<|content_audio_input|>",
            "<|content_audio|>",
        ),
        slots={
            "image": Slot("<|content_image|><|unused_200054|>"),
            "audio": Slot("<|content_audio_input|><|unused_200053|>"),
        },
        config={
            # Widths follow from the number of layers and the patch size; 24 layers take 3 TB.
            "vision_config": {"n_layers": 2},
            "text_config": {
                "swa_head_dim": 16,
                "swa_num_attention_heads": 4,
                "swa_num_key_value_heads": 2,
            },
        },
    ),
    Family(
        name="dots3_note",
        model_type="dots3_note",
        processor="Dots3NoteProcessor",
        image=Part(
            "Qwen2VLImageProcessor",
            # Its vision tower takes single frames.
            {
                "size": {"shortest_edge": 3136, "longest_edge": 12845056},
                "temporal_patch_size": 1,
            },
        ),
        video=Part("Qwen3VLVideoProcessor", {"patch_size": 14, "temporal_patch_size": 1}),
        audio=Part("Dots3NoteFeatureExtractor"),
        tokens=("<|imgpad|>", "<|video_pad|>", "<|audio_comp_pad|>", "<|img|>", "<|endofimg|>"),
        slots={
            "image": Slot("<|img|><|imgpad|><|endofimg|>"),
            "video": Slot("<|video_pad|>"),
            "audio": Slot("<|audio_comp_pad|>"),
        },
        config={
            "text_config": {
                "num_key_value_heads": 4,
                # 16 entries without position and 16 with.
                "head_dim": 32,
                "rope_parameters": {
                    "indexed_attention": {"partial_rotary_factor": 0.5},
                    "sliding_attention": {"partial_rotary_factor": 0.5},
                },
                "per_layer_config": {"0": {"num_key_value_heads": 4}},
            },
            "audio_config": {
                "num_key_value_heads": 4,
                "adapter_input_size": 64,
                "downsample_hidden_size": 32,
                "conv_output_size": 512,
            },
            "vision_config": {"adapter_in_dim": 64, "per_layer_config": {}},
        },
    ),
)
