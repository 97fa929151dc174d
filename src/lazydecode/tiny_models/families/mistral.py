"""Pixtral, Mistral 3, Voxtral, and LightOnOCR, which uses Pixtral's processor."""

from lazydecode.tiny_models.config import WIDTH
from lazydecode.tiny_models.records import Family, Part
from lazydecode.tiny_models.turns import MISTRAL, Slot

_WHISPER_128 = Part("WhisperFeatureExtractor", {"feature_size": 128})

FAMILIES = (
    Family(
        name="pixtral",
        model_type="llava",
        processor="PixtralProcessor",
        turns=MISTRAL,
        image=Part("PixtralImageProcessor"),
        processor_options={"patch_size": 16},
        tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        slots={"image": Slot("[IMG]")},
        bos="<s>",
        eos="</s>",
        pad="<pad>",
        config={
            "vision_config": {"model_type": "pixtral", "image_size": 1024, "patch_size": 16},
            "text_config": {"model_type": "mistral"},
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
    ),
    Family(
        name="mistral3",
        model_type="mistral3",
        processor="PixtralProcessor",
        turns=MISTRAL,
        image=Part("PixtralImageProcessor", {"patch_size": 14, "size": {"longest_edge": 1540}}),
        processor_options={"patch_size": 14, "spatial_merge_size": 2},
        tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        slots={"image": Slot("[IMG]")},
        bos="<s>",
        eos="</s>",
        pad="<pad>",
    ),
    Family(
        name="lighton_ocr",
        model_type="lighton_ocr",
        processor="LightOnOcrProcessor",
        image=Part("PixtralImageProcessor", {"patch_size": 14, "size": {"longest_edge": 1540}}),
        processor_options={"patch_size": 14, "spatial_merge_size": 2},
        named_tokens={
            "image_token": "<|image_pad|>",
            "image_break_token": "<|vision_pad|>",
            "image_end_token": "<|vision_end|>",
        },
        slots={"image": Slot("<|image_pad|>")},
    ),
    Family(
        name="voxtral",
        model_type="voxtral",
        processor="VoxtralProcessor",
        audio=_WHISPER_128,
        mistral_tokenizer=True,
        # The width of a projector that takes four positions of the encoder at once.
        config={"audio_config": {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH}},
        needs=("mistral_common",),
        note="mistral-common writes the prompt",
    ),
)
