"""Families that embed images, sounds and text for retrieval."""

from lazydecode.tiny_models.records import Family, Part
from lazydecode.tiny_models.turns import BARE, Slot

_VISION_TOKENS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

FAMILIES = (
    Family(
        name="clip",
        model_type="clip",
        processor="CLIPProcessor",
        turns=BARE,
        image=Part("CLIPImageProcessor"),
        slots={"image": Slot("")},
        bos="<|startoftext|>",
        pad="<|endoftext|>",
    ),
    Family(
        name="clap",
        model_type="clap",
        processor="ClapProcessor",
        turns=BARE,
        audio=Part("ClapFeatureExtractor", {"truncation": "rand_trunc", "frequency_min": 50}),
        slots={"audio": Slot("")},
        bos="<s>",
        eos="</s>",
        pad="<pad>",
        # Positions are counted from the id of the padding token, as in RoBERTa.
        config={"text_config": {"max_position_embeddings": 1200}},
    ),
    Family(
        name="siglip",
        model_type="siglip",
        processor="SiglipProcessor",
        turns=BARE,
        image=Part("SiglipImageProcessor"),
        slots={"image": Slot("")},
        eos="</s>",
        pad="<pad>",
    ),
    Family(
        name="siglip2",
        model_type="siglip2",
        processor="Siglip2Processor",
        turns=BARE,
        image=Part("Siglip2ImageProcessor"),
        tokens=("<unk>",),
        slots={"image": Slot("")},
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
    ),
    Family(
        name="colqwen2",
        model_type="colqwen2",
        processor="ColQwen2Processor",
        image=Part(
            "Qwen2VLImageProcessor", {"size": {"shortest_edge": 3136, "longest_edge": 12845056}}
        ),
        tokens=_VISION_TOKENS,
        slots={"image": Slot("")},
        note="the processor writes its own prompt around each image",
    ),
    Family(
        name="colpali",
        model_type="colpali",
        processor="ColPaliProcessor",
        turns=BARE,
        image=Part(
            "SiglipImageProcessor",
            {"size": {"height": 448, "width": 448}},
            attributes={"image_seq_length": 1024},
        ),
        named_tokens={"image_token": "<image>"},
        slots={"image": Slot("")},
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        note="the processor writes its own prompt around each image",
    ),
)
