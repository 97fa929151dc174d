"""Families for documents and text recognition."""

from lazydecode.tiny_models.records import Family, Part
from lazydecode.tiny_models.turns import BARE, Slot

FAMILIES = (
    Family(
        name="got_ocr2",
        model_type="got_ocr2",
        processor="GotOcr2Processor",
        turns=BARE,
        image=Part("GotOcr2ImageProcessor", {"size": {"height": 1024, "width": 1024}}),
        tokens=("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<imgpad>"),
        slots={"image": Slot("<img><imgpad></img>\n")},
    ),
    Family(
        name="deepseek_ocr2",
        model_type="deepseek_ocr2",
        processor="DeepseekOcr2Processor",
        turns=BARE,
        image=Part("DeepseekOcr2ImageProcessor"),
        tokens=("<image>",),
        slots={"image": Slot("<image>\n")},
        bos="<s>",
        eos="</s>",
        pad="<pad>",
        config={
            "vision_config": {
                "sam_config": {
                    "downsample_channels": [64, 64],
                    "mlp_dim": 128,
                    "global_attn_indexes": [1],
                }
            },
            "text_config": {
                "num_experts_per_tok": 2,
                "mlp_layer_types": ["dense", "sparse"],
                "n_group": 1,
                "topk_group": 1,
            },
        },
    ),
    Family(
        name="paddleocr_vl",
        model_type="paddleocr_vl",
        processor="PaddleOCRVLProcessor",
        turns=BARE,
        image=Part("PaddleOCRVLImageProcessor"),
        tokens=("<|IMAGE_START|>", "<|IMAGE_END|>"),
        named_tokens={"image_token": "<|IMAGE_PLACEHOLDER|>"},
        slots={"image": Slot("<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>")},
        config={"text_config": {"rope_parameters": {"mrope_section": [2, 3, 3]}}},
    ),
    Family(
        name="hunyuan_vl",
        model_type="hunyuan_vl",
        processor="HunYuanVLProcessor",
        turns=BARE,
        image=Part("HunYuanVLImageProcessor"),
        named_tokens={
            "image_token": "<|image_pad|>",
            "image_start_token": "<|vision_start|>",
            "image_end_token": "<|vision_end|>",
        },
        slots={"image": Slot("<|vision_start|><|image_pad|><|vision_end|>")},
        config={
            "text_config": {"head_dim": 16, "rope_parameters": {"mrope_section": [2, 2, 2, 2]}}
        },
    ),
    Family(
        name="florence2",
        model_type="florence2",
        processor="Florence2Processor",
        turns=BARE,
        image=Part(
            "CLIPImageProcessor",
            {"size": {"height": 768, "width": 768}, "do_center_crop": False},
            attributes={"image_seq_length": 577},
        ),
        named_tokens={"image_token": "<image>"},
        slots={"image": Slot("")},
        bos="<s>",
        eos="</s>",
        pad="<pad>",
        config={
            "vision_config": {
                "depths": [1, 1, 1, 1],
                "embed_dim": [16, 32, 32, 64],
                "num_groups": [1, 2, 2, 4],
                "num_heads": [1, 2, 2, 4],
            }
        },
        note="encoder-decoder; the processor itself writes the placeholder",
    ),
)
