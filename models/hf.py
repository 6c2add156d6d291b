"""Loading a published GLM-5.x checkpoint directory in the Hugging Face layout."""

import logging
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.glm.model import GlmModel
from dhisparse_jax.models.hf_config import parse_config, read_json
from dhisparse_jax.models.hf_tensors import Shape, build_params, published_shapes
from dhisparse_jax.models.params import abstract_params, build_model, cast_like
from dhisparse_jax.models.text import few

log = logging.getLogger(__name__)

_DTYPES = {"F32", "BF16", "F16"}
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
    with ExitStack() as stack:
        opened = {
            path: stack.enter_context(_open(path)) for path in sorted(set(tensors.files.values()))
        }
        params = build_params(
            config, lambda name: _read(opened[tensors.files[name]], name, tensors.files[name])
        )
    params = cast_like(params, abstract_params(config))
    return config, build_model(config, params, jnp.dtype(dtype or config.param_dtype))


def find_tensors(directory: Path, config: GlmConfig) -> Tensors:
    """Locates every tensor of the model and checks names, shapes and types from the headers.

    Raises:
        UserError: See `load_hf`.
    """
    expected = published_shapes(config)
    files: dict[str, Path] = {}
    found: dict[str, Shape] = {}
    types: dict[str, str] = {}
    for path in _tensor_files(directory):
        with _open(path) as opened:
            for name in opened.keys():  # noqa: SIM118  # not a mapping
                header = opened.get_slice(name)
                files[name], found[name] = path, tuple(header.get_shape())
                types[name] = header.get_dtype()
    ignored = {name for name in found if _is_mtp(name, config.num_layers)}
    _check_names(expected, found.keys() - ignored)
    _check_shapes(expected, found)
    _check_types({name: types[name] for name in expected})
    return Tensors({name: files[name] for name in expected}, tuple(sorted(ignored)))


def _is_mtp(name: str, num_layers: int) -> bool:
    """Whether a tensor belongs to a layer behind the last one of the model."""
    match = _LAYER.match(name)
    return match is not None and int(match[1]) >= num_layers


def _tensor_files(directory: Path) -> list[Path]:
    """The single file, or the files that the index of a sharded checkpoint lists."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise UserError(f"{directory} holds neither {single.name} nor {index.name}")
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
        raise UserError(f"{index} has no weight_map of tensor names to file names")
    paths = sorted({directory / Path(shard).name for shard in shards.values()})
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise UserError(f"{len(absent)} of {len(paths)} shards are missing: {few(absent)}")
    return paths


def _open(path: Path) -> Any:  # noqa: ANN401  # safetensors has no public type for it
    """Opens a safetensors file and checks its header against its size."""
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or not a safetensors file: {error}") from error


def _read(opened: Any, name: str, path: Path) -> np.ndarray:  # noqa: ANN401
    """One tensor as an array."""
    try:
        return opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read {name} from {path}: {error}") from error


def _check_names(expected: dict[str, Shape], found: Iterable[str]) -> None:
    missing = sorted(expected.keys() - set(found))
    extra = sorted(set(found) - expected.keys())
    if missing:
        shapes = [f"{name} {list(expected[name])}" for name in missing]
        raise UserError(f"the checkpoint lacks {len(missing)} tensors: {few(shapes)}")
    if extra:
        raise UserError(f"the checkpoint has {len(extra)} tensors too many: {few(extra)}")


def _check_shapes(expected: dict[str, Shape], found: dict[str, Shape]) -> None:
    wrong = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if found[name] != shape
    ]
    if wrong:
        raise UserError(f"{len(wrong)} tensors have the wrong shape: {few(wrong)}")


def _check_types(types: dict[str, str]) -> None:
    wrong = [f"{name} is {kind}" for name, kind in types.items() if kind not in _DTYPES]
    if wrong:
        raise UserError(
            f"{len(wrong)} tensors are not of {', '.join(sorted(_DTYPES))}: {few(wrong)}"
        )
