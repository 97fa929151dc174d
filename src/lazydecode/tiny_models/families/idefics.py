"""Idefics and SmolVLM."""

from lazydecode.tiny_models.records import Family, Part
from lazydecode.tiny_models.turns import IDEFICS, Slot

FAMILIES = (
    Family(
        name="idefics2",
        model_type="idefics2",
        processor="Idefics2Processor",
        turns=IDEFICS,
        image=Part("Idefics2ImageProcessor"),
        tokens=("<fake_token_around_image>", "<image>"),
        slots={"image": Slot("<image>")},
        bos="<s>",
        eos="</s>",
        pad="<pad>",
    ),
    Family(
        name="idefics3",
        model_type="idefics3",
        processor="Idefics3Processor",
        turns=IDEFICS,
        image=Part("Idefics3ImageProcessor"),
        processor_options={"image_seq_len": 169},
        tokens=(
            "<fake_token_around_image>",
            "<image>",
            "<global-img>",
            *(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)),
        ),
        slots={"image": Slot("<image>")},
        bos="<|begin_of_text|>",
        eos="<|end_of_text|>",
        config={
            "vision_config": {"image_size": 364, "patch_size": 14},
            "text_config": {"max_position_embeddings": 131072},
        },
    ),
    Family(
        name="granite_docling",
        model_type="granite_docling",
        processor="GraniteDoclingProcessor",
        turns=IDEFICS,
        image=Part("GraniteDoclingImageProcessor"),
        tokens=(
            "<fake_token_around_image>",
            "<image>",
            "<global-img>",
            *(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)),
        ),
        slots={"image": Slot("<image>")},
        bos="<|begin_of_text|>",
        eos="<|end_of_text|>",
    ),
    Family(
        name="smolvlm",
        model_type="smolvlm",
        processor="SmolVLMProcessor",
        turns=IDEFICS,
        image=Part(
            "SmolVLMImageProcessor",
            {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
        ),
        video=Part(
            "SmolVLMVideoProcessor",
            {
                "size": {"longest_edge": 512},
                "max_image_size": {"longest_edge": 512},
                "num_frames": 64,
                "fps": 1,
                "video_sampling": {"max_frames": 64, "fps": 1, "video_size": {"longest_edge": 512}},
            },
        ),
        processor_options={"image_seq_len": 64},
        tokens=(
            "<fake_token_around_image>",
            "<image>",
            "<video>",
            "<global-img>",
            *(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)),
        ),
        needs=("num2words",),
        slots={"image": Slot("<image>"), "video": Slot("<video>")},
        bos="<|im_start|>",
        eos="<|im_end|>",
    ),
)
