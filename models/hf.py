"""Loading a published GLM-5.x checkpoint directory in the Hugging Face layout."""

import logging
import re
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.models.glm.model import GlmModel
from dhisparse_jax.models.hf_config import parse_config, read_json
from dhisparse_jax.models.hf_tensors import build_params, published_shapes
from dhisparse_jax.models.params import abstract_params, build_model, cast_like
from dhisparse_jax.models.tensor_files import check_headers, read_headers, reading

log = logging.getLogger(__name__)

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class Tensors(NamedTuple):
    """Tensors of a checkpoint directory.

    Attributes:
        files: Name of a tensor to the file that holds it, for the tensors of the model.
        ignored: Sorted names of tensors of MTP layers, which are not loaded.
    """

    files: dict[str, Path]
    ignored: tuple[str, ...]


def load_hf(
    directory: Path | str, *, dtype: jnp.dtype | type | None = None
) -> tuple[GlmConfig, GlmModel]:
    """Loads `config.json` and the safetensors beside it.

    Tensors of MTP layers are skipped; their number is logged, and `find_tensors` names them.

    Args:
        directory: Holds config.json and model.safetensors, or shards and their index.
        dtype: Compute dtype of the model; the dtype of the weights when None.

    Raises:
        UserError: Missing or damaged files, another model, or tensors that are missing, left over,
            wrongly shaped, or of an unsupported type.
    """
    directory = Path(directory)
    config = parse_config(read_json(directory / "config.json"))
    tensors = find_tensors(directory, config)
    if tensors.ignored:
        log.info("ignored %d tensors of MTP layers", len(tensors.ignored))
    with reading(tensors.files) as read:
        params = build_params(config, read)
    params = cast_like(params, abstract_params(config))
    return config, build_model(config, params, jnp.dtype(dtype or config.param_dtype))


def find_tensors(directory: Path, config: GlmConfig) -> Tensors:
    """Locates every tensor of the model and checks names, shapes and types from the headers.

    Raises:
        UserError: See `load_hf`.
    """
    expected = published_shapes(config)
    headers = read_headers(directory)
    ignored = {name for name in headers if _is_mtp(name, config.num_layers)}
    check_headers(
        expected, {name: header for name, header in headers.items() if name not in ignored}
    )
    return Tensors({name: headers[name].file for name in expected}, tuple(sorted(ignored)))


def _is_mtp(name: str, num_layers: int) -> bool:
    """Whether a tensor belongs to a layer behind the last one of the model."""
    match = _LAYER.match(name)
    return match is not None and int(match[1]) >= num_layers
