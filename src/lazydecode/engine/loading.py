"""Loading a model's weights with Transformers, and what its configuration says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Final

import torch
import transformers

from lazydecode.engine.corrections import correct
from lazydecode.engine.protocol import EngineInfo, recommended_sampling
from lazydecode.engine.wire import DTYPES, dtype_name
from lazydecode.errors import EngineError

logger = logging.getLogger(__name__)

_AUTO_CLASSES: Final = ("AutoModelForMultimodalLM", "AutoModelForCausalLM")
_ID_SUFFIXES: Final = ("_token_id", "_token_index")


def load_model(model: str, *, device: str, dtype: str, trust_remote_code: bool) -> Any:
    """Return a generating model in evaluation mode on its device.

    Args:
        model: A local folder or a hub id.
        device: `cpu`, `cuda`, `cuda:N`, or `auto` for the first GPU if there is one.
        dtype: Torch's name, or `auto` for what the model states.
        trust_remote_code: Whether code in the model's folder may run.

    Raises:
        EngineError: If the options name nothing that exists, or the model cannot generate.
        OSError: If there is no such model, or files of it are missing.
    """
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    model_class = _model_class(config)
    logger.info("loading %s as %s", model, model_class.__name__)
    loaded = model_class.from_pretrained(
        model, config=config, dtype=_dtype(dtype), trust_remote_code=trust_remote_code
    )
    if hasattr(loaded, "thinker"):
        # Omni models: the part that reads and writes text. The rest speaks, which we do not serve.
        loaded.thinker.generation_config = loaded.generation_config
        loaded = loaded.thinker
    correct(loaded)
    if not hasattr(loaded, "generate"):
        raise EngineError(f"{type(loaded).__name__} cannot generate text")
    return loaded.to(_device(device)).eval()


def describe_model(name: str, model: Any, max_model_len: int | None) -> EngineInfo:
    """Return what requests need to know of a loaded model.

    Raises:
        EngineError: If `max_model_len` is more than the model has positions for.
    """
    limit = _max_positions(model.config)
    if max_model_len is not None and limit is not None and max_model_len > limit:
        raise EngineError(f"max_model_len is {max_model_len}, but the model has {limit} positions")
    generation = model.generation_config
    eos = generation.eos_token_id
    if eos is None:
        eos = getattr(model.config.get_text_config(), "eos_token_id", None)
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    return EngineInfo(
        model=name,
        max_model_len=max_model_len or limit,
        vocab_size=_num_token_ids(model),
        eos_token_ids=eos_ids,
        dtype=dtype_name(model.dtype),
        device=str(model.device),
        default_sampling=recommended_sampling(generation.to_dict()),
    )


def _model_class(config: Any) -> Any:
    for name in config.architectures or ():
        model_class = getattr(transformers, name, None)
        if model_class is not None and hasattr(model_class, "generate"):
            return model_class
    for auto in (getattr(transformers, name) for name in _AUTO_CLASSES):
        # Remote code is known by its auto_map, everything else by the type of its config.
        is_remote = auto.__name__ in (getattr(config, "auto_map", None) or {})
        if is_remote or type(config) in auto._model_mapping:
            return auto
    raise EngineError(
        f"Transformers {transformers.__version__} has no generating model for the type "
        f"{config.model_type!r}"
    )


def _dtype(name: str) -> torch.dtype | str:
    if name == "auto":
        return name
    dtype = DTYPES.get(name)
    if dtype is None or not dtype.is_floating_point:
        known = ", ".join(name for name, dtype in DTYPES.items() if dtype.is_floating_point)
        raise EngineError(f"dtype {name!r} is none of auto, {known}")
    return dtype


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as exc:  # AssertionError: torch built without CUDA
        raise EngineError(f"device {name!r} cannot be used: {exc}") from exc
    return device


def _max_positions(config: Any) -> int | None:
    for part in (config.get_text_config(), config):
        for name in ("max_position_embeddings", "max_target_positions", "n_positions"):
            value = getattr(part, name, None)
            if isinstance(value, int):
                return value
    return None


def _num_token_ids(model: Any) -> int:
    """Return the bound below which token ids are.

    Placeholder ids may lie beyond the embeddings: such models replace them before the look-up.
    """
    placeholders = [value + 1 for value in _placeholder_ids(model.config)]
    return max([int(model.get_input_embeddings().num_embeddings), *placeholders])


def _placeholder_ids(config: Any) -> Iterator[int]:
    for name, value in config.to_dict().items():
        if name.endswith(_ID_SUFFIXES) and type(value) is int:
            yield value
