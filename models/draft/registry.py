"""Drafts by name: those of the bundled model, or a checkpoint folder. What `--draft` means."""

from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from dhisparse_jax.errors import UserError
from dhisparse_jax.models.attached.drafter import AttachedDrafter
from dhisparse_jax.models.attached.drafter import drafter_of as attached_drafter
from dhisparse_jax.models.attached.load import load_attached
from dhisparse_jax.models.deepseek_v4.decode import V4Served
from dhisparse_jax.models.deepseek_v41.decode import V41Served
from dhisparse_jax.models.draft.block import Vocabulary
from dhisparse_jax.models.draft.checkpoint import CONFIG_FILE, build_draft, load_own_draft
from dhisparse_jax.models.draft.config import check_target
from dhisparse_jax.models.draft.drafter import BlockDrafter, DrafterParams, drafter_of
from dhisparse_jax.models.draft.hf import load_published_draft
from dhisparse_jax.models.glm.decode import GlmServed
from dhisparse_jax.models.registry import BUNDLED, LoadedModel

KINDS = ("dflash", "dflash2", "dspark")
ATTACHED = "dspark"
BUNDLED_DRAFTS = {kind: BUNDLED["tiny"] / "drafts" / kind for kind in KINDS}


def load_draft(
    name: str, loaded: LoadedModel, length: int | None = None
) -> tuple[BlockDrafter | AttachedDrafter, DrafterParams]:
    """Opens a draft for a target.

    Args:
        name: a bundled draft's name, or the path of a checkpoint folder: a published one, or one
            that training wrote. Of DeepSeek-V4 and V4.1: ATTACHED for the draft that is in the
            model's own checkpoint, or the folder of another checkpoint that has one.
        loaded: the target; the draft computes in its dtype, and uses its embedding and head.
        length: tokens to propose per step; None: as many as the draft can.

    Returns:
        The drafter, and everything that its functions take as `params`.

    Raises:
        UserError: there is no such draft, its files are not usable, or it does not fit the target.
    """
    if isinstance(loaded.model, V4Served | V41Served):
        return _load_attached(name, loaded.model, loaded, length)
    directory = BUNDLED_DRAFTS.get(name, Path(name))
    if not directory.is_dir():
        bundled = [kind for kind, path in BUNDLED_DRAFTS.items() if path.is_dir()]
        raise UserError(
            f"unknown draft {name}: neither bundled ({', '.join(bundled) or 'none is'}) nor the "
            "folder of a checkpoint"
        )
    if not isinstance(loaded.model, GlmServed):
        raise UserError(f"the model {loaded.name} has no layers that a draft can read")
    target = nnx.merge(loaded.model.graph, loaded.params)
    embedding, head = target.embedding[...], target.head.kernel[...]
    if (directory / CONFIG_FILE).is_file():
        config, params = load_own_draft(directory)
    else:
        published = load_published_draft(directory, target.config)
        config, params = published.config, published.params
        embedding = _own_or(published.embedding, embedding)
        head = _own_or(published.head, head)
    check_target(config, target.config, embedding.shape[1])
    _check_length(length, config.length)
    model = build_draft(config, params, target.dtype)
    vocabulary = Vocabulary(embedding, head)
    return drafter_of(model, config, vocabulary, length=length, positions=loaded.context)


def _load_attached(
    name: str, target: V4Served | V41Served, loaded: LoadedModel, length: int | None
) -> tuple[AttachedDrafter, DrafterParams]:
    """The draft of the target's own checkpoint, or of another one."""
    directory = loaded.directory if name == ATTACHED else Path(name)
    if not directory.is_dir():
        raise UserError(
            f"unknown draft {name}: neither {ATTACHED}, which the checkpoint of {loaded.name} may "
            "have attached, nor the folder of another checkpoint that has one"
        )
    try:
        config, model = load_attached(directory, target.config, jnp.dtype(target.dtype))
    except UserError as error:
        raise UserError(f"{error}; --draft none runs without it") from error
    _check_length(length, config.block_size)
    weights = nnx.merge(target.graph, loaded.params)
    shared = weights.embedding[...], weights.head.kernel[...]
    return attached_drafter(model, config, target.config, shared, length=length)


def _check_length(length: int | None, most: int) -> None:
    """Raises UserError where a draft cannot propose so many tokens."""
    if length is not None and not 1 <= length <= most:
        raise UserError(f"draft length {length} is not possible: this draft proposes 1 to {most}")


def _own_or(own: object, shared: jax.Array) -> jax.Array:
    """The draft's own weights if it has some."""
    return shared if own is None else jnp.asarray(own)
