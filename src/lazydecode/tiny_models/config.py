"""Configurations of tiny models: the family's own class, with small networks.

What decides token counts and tensor shapes at the border (patch size, merge size, image size,
mel bins) keeps its published value; widths and depths become small.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lazydecode.tiny_models.records import Family

WIDTH = 64
DEPTH = 2
HEADS = 4

_CEILINGS: Mapping[str, int] = {
    # widths
    "hidden_size": WIDTH,
    "embed_dim": WIDTH,
    "d_model": WIDTH,
    "n_embd": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "moe_intermediate_size": WIDTH,
    "shared_expert_intermediate_size": WIDTH,
    "shared_experts_intermediate_size": WIDTH,
    "hidden_size_per_layer_input": WIDTH,
    "q_lora_rank": WIDTH // 2,
    "kv_lora_rank": WIDTH // 2,
    # widths of outputs, which are the next part's width
    "out_hidden_size": WIDTH,
    "output_dim": WIDTH,
    "projection_dim": WIDTH,
    "text_hidden_size": WIDTH,
    "adapter_out_dim": WIDTH,
    "encoder_hidden_size": WIDTH,
    # depths
    "num_hidden_layers": DEPTH,
    "encoder_layers": DEPTH,
    "decoder_layers": DEPTH,
    "num_layers": DEPTH,
    "n_layer": DEPTH,
    "depth": DEPTH,
    # heads
    "num_attention_heads": HEADS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "attention_heads": HEADS,
    "num_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": WIDTH // HEADS,
    "qk_nope_head_dim": WIDTH // HEADS,
    "qk_rope_head_dim": WIDTH // HEADS,
    "v_head_dim": WIDTH // HEADS,
    # experts
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
"""Largest value of each setting that scales a network."""

_MROPE_SECTION = [2, 3, 3]
"""Sections of a rotary embedding over time, height and width: half of a head's entries."""

_DEPTH_SETTINGS = ("num_hidden_layers", "depth", "num_layers", "encoder_layers", "n_layer")


def shrink(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with every width, depth, and head and expert count cut to its ceiling.

    A list with one entry per layer keeps its last ones, and so do settings of single layers, so
    that a stack that mixes kinds of layers still ends as the published one does.
    """
    depths = {config[name] for name in _DEPTH_SETTINGS if isinstance(config.get(name), int)}
    small: dict[str, Any] = {}
    for name, value in config.items():
        if name == "per_layer_config" and isinstance(value, Mapping):
            first = max(depths) - DEPTH
            kept = {int(layer) - first: own for layer, own in value.items() if int(layer) >= first}
            small[name] = {str(layer): shrink(own) for layer, own in kept.items()}
        elif name == "mrope_section" and isinstance(value, list) and len(value) == 3:
            small[name] = _MROPE_SECTION
        elif name == "deepstack_visual_indexes":
            small[name] = list(range(DEPTH))
        elif isinstance(value, Mapping):
            small[name] = shrink(value)
        elif isinstance(value, list) and len(value) > DEPTH and len(value) in depths:
            small[name] = value[-DEPTH:]
        elif isinstance(value, list):
            small[name] = [shrink(v) if isinstance(v, Mapping) else v for v in value]
        elif isinstance(value, int) and not isinstance(value, bool) and name in _CEILINGS:
            small[name] = min(value, _CEILINGS[name])
        else:
            small[name] = value
    return small


def shrunk_default(model_type: str) -> dict[str, Any]:
    """Return the default configuration of a type, shrunk, as a dictionary."""
    from transformers import CONFIG_MAPPING

    default = CONFIG_MAPPING[model_type]()
    return shrink(json.loads(default.to_json_string(use_diff=False)))


def merge(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with `changes` laid over it; mappings merge, other values replace.

    A mapping that names another `model_type` than the one it meets starts from that type's
    default instead.
    """
    merged = dict(config)
    for name, value in changes.items():
        if not isinstance(value, Mapping):
            merged[name] = value
            continue
        old = merged.get(name)
        wanted = value.get("model_type")
        if wanted is not None and (not isinstance(old, Mapping) or old["model_type"] != wanted):
            old = shrunk_default(wanted)
        merged[name] = merge(old if isinstance(old, Mapping) else {}, value)
    return merged


def fill_token_ids(config: dict[str, Any], ids: Mapping[str, Any], *, rows: int) -> None:
    """Write token ids and vocabulary sizes into `config` in place, at every depth.

    Args:
        config: The configuration as a dictionary.
        ids: What to write, by the name of the setting.
        rows: Rows of the token embedding.
    """
    for name, value in config.items():
        if name in ids:
            config[name] = ids[name]
        elif isinstance(value, dict):
            fill_token_ids(value, ids, rows=rows)
        elif name in ("vocab_size", "vocab_size_per_layer_input"):
            config[name] = rows


def token_ids(family: Family, tokenizer: Any, processor: Any) -> dict[str, Any]:
    """Return the ids that configurations hold, by the names of the settings."""
    ids: dict[str, Any] = {}
    for name in ("bos", "eos", "pad"):
        ids[f"{name}_token_id"] = getattr(tokenizer, f"{name}_token_id")
    for modality in ("image", "video", "audio"):
        token_id = getattr(processor, f"{modality}_token_id", None)
        if isinstance(token_id, int):
            ids[f"{modality}_token_id"] = ids[f"{modality}_token_index"] = token_id
    vocabulary = tokenizer.get_vocab()
    for name in ("vision_start", "vision_end"):
        if f"<|{name}|>" in vocabulary:
            ids[f"{name}_token_id"] = vocabulary[f"<|{name}|>"]
    # Models that draw images map the tokens of their codebook by name.
    ids["vocabulary_map"] = vocabulary
    for name, texts in family.token_settings.items():
        if isinstance(texts, str):
            ids[name] = vocabulary[texts]
        else:
            ids[name] = [vocabulary[text] for text in texts]
    return ids


def tiny_config(family: Family, tokenizer: Any, processor: Any) -> dict[str, Any]:
    """Return the family's configuration: small, with this tokenizer's ids.

    Args:
        family: Whose configuration class to take.
        tokenizer: The family's tokenizer.
        processor: The family's processor, which knows its media tokens; None without media.
    """
    config = merge(shrunk_default(family.model_type), family.config)
    fill_token_ids(config, token_ids(family, tokenizer, processor), rows=len(tokenizer))
    config["model_type"] = family.model_type
    config["dtype"] = family.dtype
    return config


def generation_config(family: Family, tokenizer: Any) -> dict[str, Any]:
    """Return the family's generation configuration, with this tokenizer's ids."""
    vocabulary = tokenizer.get_vocab()
    config: dict[str, Any] = dict(family.generation)
    for name, texts in family.generation_tokens.items():
        if isinstance(texts, str):
            config[name] = vocabulary[texts]
        elif isinstance(texts, Mapping):
            config[name] = {key: vocabulary[text] for key, text in texts.items()}
        else:
            config[name] = [vocabulary[text] for text in texts]
    return config
