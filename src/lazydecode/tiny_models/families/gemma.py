"""Gemma and PaliGemma."""

from lazydecode.tiny_models.records import Family, Part
from lazydecode.tiny_models.tokenizer import NUM_TEXT_TOKENS
from lazydecode.tiny_models.turns import BARE, GEMMA, GEMMA4, Slot

FAMILIES = (
    Family(
        name="gemma3",
        model_type="gemma3",
        processor="Gemma3Processor",
        turns=GEMMA,
        image=Part("Gemma3ImageProcessor", {"size": {"height": 896, "width": 896}}),
        processor_options={"image_seq_length": 256},
        named_tokens={
            "boi_token": "<start_of_image>",
            "image_token": "<image_soft_token>",
            "eoi_token": "<end_of_image>",
        },
        slots={"image": Slot("<start_of_image>")},
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        config={"vision_config": {"image_size": 896, "patch_size": 14, "vision_use_head": False}},
        token_settings={
            "image_token_index": "<image_soft_token>",
            "image_token_id": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
    ),
    Family(
        name="gemma3n",
        model_type="gemma3n",
        processor="Gemma3nProcessor",
        turns=GEMMA,
        image=Part(
            "SiglipImageProcessor", {"size": {"height": 768, "width": 768}, "do_normalize": False}
        ),
        audio=Part("Gemma3nAudioFeatureExtractor"),
        named_tokens={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "audio_token": "<audio_soft_token>",
            "boa_token": "<start_of_audio>",
            "eoa_token": "<end_of_audio>",
        },
        slots={"image": Slot("<image_soft_token>"), "audio": Slot("<audio_soft_token>")},
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        config={
            "text_config": {
                "intermediate_size": [128, 128],
                "laurel_rank": 8,
                "num_kv_shared_layers": 0,
            },
            # The width of what the tower puts out is fixed; the layers before it become narrow.
            "vision_config": {
                "hidden_size": 2048,
                "model_args": {"channel_multiplier": 0.02},
                "vocab_offset": NUM_TEXT_TOKENS,
            },
            "audio_config": {
                "vocab_offset": NUM_TEXT_TOKENS + 1,  # the last id of all must be beyond it
                "conf_num_hidden_layers": 2,
                "conf_num_attention_heads": 4,
                "sscp_conv_channel_size": [16, 8],
            },
        },
        weights_need=("timm",),
    ),
    Family(
        name="gemma4",
        model_type="gemma4",
        processor="Gemma4Processor",
        turns=GEMMA4,
        image=Part("Gemma4ImageProcessor"),
        video=Part("Gemma4VideoProcessor"),
        audio=Part("Gemma4AudioFeatureExtractor"),
        tokens=("<|video|>",),
        named_tokens={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        slots={"image": Slot("<|image|>"), "video": Slot("<|video|>"), "audio": Slot("<|audio|>")},
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        config={
            "vision_config": {"model_type": "gemma4_vision"},
            "audio_config": {"model_type": "gemma4_audio"},
        },
    ),
    Family(
        name="gemma4_unified",
        model_type="gemma4_unified",
        processor="Gemma4UnifiedProcessor",
        turns=GEMMA4,
        image=Part("Gemma4UnifiedImageProcessor"),
        video=Part("Gemma4UnifiedVideoProcessor"),
        audio=Part("Gemma4UnifiedAudioFeatureExtractor"),
        tokens=("<|video|>",),
        named_tokens={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        slots={"image": Slot("<|image|>"), "video": Slot("<|video|>"), "audio": Slot("<|audio|>")},
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        config={
            "vision_config": {"model_type": "gemma4_unified_vision"},
            "audio_config": {"model_type": "gemma4_unified_audio"},
        },
    ),
    Family(
        name="paligemma",
        model_type="paligemma",
        processor="PaliGemmaProcessor",
        turns=BARE,
        image=Part("SiglipImageProcessor", attributes={"image_seq_length": 256}),
        named_tokens={"image_token": "<image>"},
        slots={"image": Slot("<image>")},
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
    ),
)
