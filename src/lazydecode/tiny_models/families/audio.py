"""Families that take audio and no images."""

from lazydecode.tiny_models.records import Family, Part
from lazydecode.tiny_models.turns import BARE, GLM, QWEN, VICUNA, Slot

_WHISPER_128 = Part("WhisperFeatureExtractor", {"feature_size": 128})

FAMILIES = (
    Family(
        name="qwen2_audio",
        model_type="qwen2_audio",
        processor="Qwen2AudioProcessor",
        turns=QWEN,
        audio=_WHISPER_128,
        tokens=("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        slots={"audio": Slot("<|audio_bos|><|AUDIO|><|audio_eos|>\n", "Audio {n}: ")},
        eos="<|im_end|>",
        pad="<|endoftext|>",
    ),
    Family(
        name="audioflamingo3",
        model_type="audioflamingo3",
        processor="AudioFlamingo3Processor",
        audio=_WHISPER_128,
        tokens=("<sound>",),
        slots={"audio": Slot("<sound>")},
    ),
    Family(
        name="musicflamingo",
        model_type="musicflamingo",
        processor="MusicFlamingoProcessor",
        audio=_WHISPER_128,
        tokens=("<sound>", "<|sound_bos|>", "<|sound_eos|>"),
        slots={"audio": Slot("<|sound_bos|><sound><|sound_eos|>")},
    ),
    Family(
        name="glmasr",
        model_type="glmasr",
        processor="GlmAsrProcessor",
        turns=GLM,
        audio=_WHISPER_128,
        tokens=("<|pad|>", "<|begin_of_audio|>", "<|end_of_audio|>"),
        slots={"audio": Slot("<|begin_of_audio|><|pad|><|end_of_audio|>")},
        pad="<|endoftext|>",
    ),
    Family(
        name="granite_speech",
        model_type="granite_speech",
        processor="GraniteSpeechProcessor",
        turns=VICUNA,
        audio=Part("GraniteSpeechFeatureExtractor"),
        audio_argument="audio_processor",
        tokens=("<|audio|>",),
        needs=("torchaudio",),
        slots={"audio": Slot("<|audio|>")},
        config={
            "has_lora_adapter": False,
            "encoder_config": {"hidden_dim": 64, "dim_head": 16, "num_heads": 4},
        },
    ),
    Family(
        name="qwen3_asr",
        model_type="qwen3_asr",
        processor="Qwen3ASRProcessor",
        audio=Part("Qwen3ASRFeatureExtractor"),
        named_tokens={
            "audio_token": "<|audio_pad|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
        slots={"audio": Slot("<|audio_start|><|audio_pad|><|audio_end|>")},
    ),
    Family(
        name="vibevoice_asr",
        model_type="vibevoice_asr",
        processor="VibeVoiceAsrProcessor",
        audio=Part("VibeVoiceAcousticTokenizerFeatureExtractor"),
        tokens=(
            "<|box_start|>",
            "<|object_ref_start|>",
            "<|object_ref_end|>",
            "<|AUDIO_DURATION|>",
        ),
        slots={"audio": Slot("<|object_ref_start|><|box_start|><|object_ref_end|>\n")},
        config={
            "acoustic_tokenizer_encoder_config": {
                "num_filters": 2,
                "depths": [1, 1, 1, 1, 1, 1, 1],
            },
            "semantic_tokenizer_encoder_config": {
                "num_filters": 2,
                "depths": [1, 1, 1, 1, 1, 1, 1],
            },
        },
    ),
    Family(
        name="fun_asr_nano",
        model_type="fun_asr_nano",
        processor="FunAsrNanoProcessor",
        audio=Part("FunAsrNanoFeatureExtractor"),
        tokens=("<|object_ref_start|>",),
        slots={"audio": Slot("<|object_ref_start|>")},
        config={"adaptor_config": {"intermediate_size": 16}},
    ),
    Family(
        name="moss_transcribe_diarize",
        model_type="moss_transcribe_diarize",
        processor="MossTranscribeDiarizeProcessor",
        audio=Part("MossTranscribeDiarizeFeatureExtractor"),
        tokens=("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"),
        slots={"audio": Slot("<|audio_start|><|audio_pad|><|audio_end|>")},
    ),
    Family(
        name="whisper",
        model_type="whisper",
        processor="WhisperProcessor",
        turns=BARE,
        audio=Part("WhisperFeatureExtractor"),
        tokens=("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"),
        slots={"audio": Slot("")},
        note="encoder-decoder: no placeholder in the text",
    ),
)
