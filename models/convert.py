"""A published checkpoint as one of ours: whole, or not there at all."""

import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

from dhisparse_jax.configs.deepseek_v4 import V4Config
from dhisparse_jax.configs.deepseek_v41 import V41Config
from dhisparse_jax.errors import UserError
from dhisparse_jax.models import chat
from dhisparse_jax.models.attached.load import attached_tensors, load_attached, save_attached
from dhisparse_jax.models.checkpoint import (
    CONVERSION_FILE,
    OWN_WEIGHTS,
    save_config,
    save_json,
    save_weights,
)
from dhisparse_jax.models.hf import load_hf
from dhisparse_jax.models.params import flatten, params_of

TEXT_FILES = ("tokenizer.json", chat.CONFIG_FILE, chat.TEMPLATE_FILE)
"""What else of a published checkpoint is used: copied as it is, where it is there."""

PARTIAL = ".partial"
_DATA_FILE_BYTES = 2**30


class Converted(NamedTuple):
    """What was written.

    Attributes:
        arrays: how many weights.
        bytes: of all weights.
        expert_format: format of the routed experts.
        unused: names of published tensors that the model does not use.
    """

    arrays: int
    bytes: int
    expert_format: str
    unused: tuple[str, ...]


def convert(
    source: Path,
    target: Path,
    *,
    dtype: jnp.dtype | type | None = None,
    stored_experts: bool = True,
) -> Converted:
    """Writes the checkpoint in `source` as one of ours to `target`, which must not exist.

    Everything is written beside the target and moved there at the end, so a conversion that was
    interrupted leaves no target; the next one begins anew. Needs host memory for all weights.

    Args:
        source: a published checkpoint.
        target: where to write.
        dtype: of weights that are dequantised, or stored as more than the configuration says; None:
            they lose nothing.
        stored_experts: whether quantised experts stay so.

    Raises:
        UserError: the target exists, or the source is not usable.
    """
    if target.exists():
        raise UserError(f"{target} exists; name a new folder, or remove it first")
    config, model, unused = load_hf(
        source, dtype=dtype, stored_experts=stored_experts, place=_on_host
    )
    flat, drafted = flatten(params_of(model)), None
    if drafts := set(attached_tensors(source, unused)):
        unused = tuple(name for name in unused if name not in drafts)
        assert isinstance(config, V4Config | V41Config)  # others have none
        drafted = load_attached(
            source, config, dtype, stored_experts=stored_experts, place=_on_host
        )
    partial = target.with_name(target.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was interrupted
    try:
        save_weights(partial / OWN_WEIGHTS, flat, file_bytes=_DATA_FILE_BYTES)
        if drafted is not None:
            save_attached(partial, *drafted, _DATA_FILE_BYTES)
        for name in TEXT_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, partial / name)
        save_json(partial / CONVERSION_FILE, {"unused_tensors": unused})
        save_config(partial, config)
        partial.rename(target)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or target}: {error.strerror}") from error
    arrays = [*flat.values(), *(flatten(params_of(drafted.model)).values() if drafted else ())]
    size = sum(array.nbytes for array in arrays)
    return Converted(len(arrays), size, config.expert_format, unused)


def _on_host(name: str, shape: tuple[int, ...]) -> Sharding:
    """Weights only pass through: they need no accelerator."""
    return SingleDeviceSharding(jax.devices("cpu")[0])
