"""Finding a drafter in a checkpoint of its target, published or ours, and loading it."""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from dhisparse_jax.arrays import Place
from dhisparse_jax.configs.attached import AttachedConfig
from dhisparse_jax.configs.deepseek_v41 import SinceV4
from dhisparse_jax.configs.values import config_of
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.attached.hf_config import has_attached, parse_attached
from dhisparse_jax.models.attached.hf_tensors import (
    ROOT,
    attached_expert_names,
    attached_pieces,
    attached_shapes,
    canonical_attached_name,
)
from dhisparse_jax.models.attached.model import AttachedModel
from dhisparse_jax.models.checkpoint import (
    CONFIG_FILE,
    OWN_WEIGHTS,
    restore_weights,
    save_json,
    save_weights,
)
from dhisparse_jax.models.families import family_of, published_family
from dhisparse_jax.models.hf import load_params, stored_format
from dhisparse_jax.models.hf_config import read_json
from dhisparse_jax.models.params import Nested, fill, flatten, params_of, unflatten
from dhisparse_jax.models.published import Published, weight_block
from dhisparse_jax.models.stream import on_first_device
from dhisparse_jax.models.tensor_files import read_headers

OWN_DRAFT = "draft"
"""The folder of the drafter in a checkpoint of ours."""

_STAGE = re.compile(rf"(?:model\.)?{ROOT}\.(\d+)\.")


class Attached(NamedTuple):
    """A drafter as it is loaded: sizes and model."""

    config: AttachedConfig
    model: AttachedModel


def make_attached(
    config: AttachedConfig, target: SinceV4, dtype: jnp.dtype | type = jnp.float32, seed: int = 0
) -> AttachedModel:
    """A drafter with random weights."""
    return AttachedModel(config, target, rngs=nnx.Rngs(seed), dtype=dtype)


def abstract_attached(config: AttachedConfig, target: SinceV4) -> Nested:
    """Shapes and dtypes of the nested weights; nothing is allocated."""
    return params_of(nnx.eval_shape(lambda: make_attached(config, target)))


def attached_tensors(directory: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Those of some tensors of a published checkpoint that are its drafter's; none without one."""
    raw = read_json(directory / CONFIG_FILE)
    if not has_attached(raw):
        return ()
    other = published_family(raw).unused
    return tuple(name for name in names if _STAGE.match(name) and not other(name))


def is_attached(directory: Path) -> bool:
    """Whether a checkpoint, published or ours, has a drafter attached."""
    path = directory / CONFIG_FILE
    if (directory / OWN_WEIGHTS).is_dir() or not path.is_file():
        return (directory / OWN_DRAFT).is_dir()
    return has_attached(read_json(path)) and any(
        _STAGE.match(name) for name in read_headers(directory)
    )


def load_attached(
    directory: Path,
    target: SinceV4,
    dtype: jnp.dtype | type | None = None,
    *,
    stored_experts: bool = True,
    place: Place = on_first_device,
) -> Attached:
    """Loads the drafter of a checkpoint, published or ours.

    Quantised weights become numbers of the compute dtype, but for those of routed experts, which
    stay as they are stored.

    Args:
        directory: of the checkpoint.
        target: sizes of the target.
        dtype: Compute dtype; None: that of the target's configuration, and weights keep what they
            are.
        stored_experts: Whether quantised experts stay so.
        place: Where each array goes, from its flat name and shape.

    Raises:
        UserError: There is no drafter, it does not fit the target, or its tensors are missing,
            left over, wrongly shaped, or of an unsupported type.
    """
    if (directory / OWN_WEIGHTS).is_dir():
        config, params = _load_own(directory, target, dtype, place)
    else:
        config, tensors = _find_published(directory, target)
        if stored_experts:
            form = stored_format(attached_expert_names(config), tensors)
            config = dataclasses.replace(config, expert_format=form)
        like = abstract_attached(config, target)
        pieces = attached_pieces(config, flatten(like))
        params = load_params(like, pieces, tensors, {}, dtype, place)
    computed = jnp.dtype(dtype or target.param_dtype)
    return Attached(config, fill(lambda: make_attached(config, target, computed), params))


def save_attached(
    directory: Path, config: AttachedConfig, model: AttachedModel, file_bytes: int
) -> None:
    """Writes a drafter into a checkpoint of ours."""
    flat = flatten(params_of(model))
    save_weights(directory / OWN_DRAFT / OWN_WEIGHTS, flat, file_bytes=file_bytes)
    save_json(directory / OWN_DRAFT / CONFIG_FILE, dataclasses.asdict(config))


def _load_own(
    directory: Path, target: SinceV4, dtype: jnp.dtype | type | None, place: Place
) -> tuple[AttachedConfig, Nested]:
    folder = (directory / OWN_DRAFT).absolute()
    if not folder.is_dir():
        raise UserError(f"{directory} has no draft attached")
    path = folder / CONFIG_FILE
    try:
        config = config_of(AttachedConfig, read_json(path))
        config.check_target(target)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    like = abstract_attached(config, target)
    flat = restore_weights(folder / OWN_WEIGHTS, flatten(like), dtype, place)
    return config, unflatten(flat, like)


def _find_published(directory: Path, target: SinceV4) -> tuple[AttachedConfig, Published]:
    """Sizes, and the tensors after their names, shapes and types were checked."""
    path = directory / CONFIG_FILE
    raw = read_json(path)
    found = [_STAGE.match(name) for name in read_headers(directory)]
    stages = [int(match[1]) for match in found if match]
    if not has_attached(raw) or not stages:
        lacking = f"{ROOT} tensors" if has_attached(raw) else "dspark entries in its config.json"
        raise UserError(f"{directory} has no draft attached: it has no {lacking}")
    try:
        config = parse_attached(raw, target, max(stages) + 1)
        block = weight_block(raw.get("quantization_config"))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    family = family_of(target)
    tensors = Published(
        directory,
        attached_shapes(config, target),
        block=block,
        canonical=canonical_attached_name,
        ignored=lambda names: [
            name for name in names if not name.startswith(f"{ROOT}.") or family.unused(name)
        ],
    )
    return config, tensors
