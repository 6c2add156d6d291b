"""Loading a published draft: `config.json` and safetensors, with the published names."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.draft.checkpoint import abstract_draft
from dhisparse_jax.models.draft.config import DraftConfig
from dhisparse_jax.models.draft.hf_config import parse_draft_config
from dhisparse_jax.models.hf_config import read_json
from dhisparse_jax.models.params import Flat, Nested, cast_like, flatten, unflatten
from dhisparse_jax.models.tensor_files import (
    Shape,
    check_headers,
    read_headers,
    read_rows,
    renamed,
)

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"

_KERNEL, _PUBLISHED_KERNEL = ".kernel", ".weight"
_PREFIX = "model."
# Names that some releases use for the same tensors.
_ALIASES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}
_LEARNED_MASK = "mask_embedding.pt"


class PublishedDraft(NamedTuple):
    """A draft as its files have it.

    Attributes:
        config: sizes.
        params: nested weights.
        embedding: the draft's own embedding, or None where it uses the target's.
        head: the draft's own head, `[d, vocab]`, or None.
    """

    config: DraftConfig
    params: Nested
    embedding: np.ndarray | None
    head: np.ndarray | None


def load_published_draft(directory: Path, target: GlmConfig) -> PublishedDraft:
    """Loads a directory with `config.json` and safetensors.

    Raises:
        UserError: Missing or damaged files, an unsupported draft, or tensors that are missing,
            left over, wrongly shaped, or of an unsupported type.
    """
    if (directory / _LEARNED_MASK).exists():
        raise UserError(
            f"{directory} has {_LEARNED_MASK}, a learned mask embedding, which is not supported; "
            "a draft without it would propose nothing useful"
        )
    config = parse_draft_config(read_json(directory / "config.json"), target)
    found = renamed(read_headers(directory), _canonical)
    own = {name for name in (EMBEDDING, HEAD) if name in found}
    expected = published_shapes(config)
    vocabulary = (config.vocab_size, config.hidden_size)
    check_headers(expected | dict.fromkeys(own, vocabulary), found)
    arrays = {name: read_rows(header) for name, header in found.items()}
    like = abstract_draft(config)
    flat: Flat = {name: _ours(name, arrays[_published(name)]) for name in flatten(like)}
    head = arrays.get(HEAD)
    return PublishedDraft(
        config=config,
        params=cast_like(unflatten(flat, like), like),
        embedding=arrays.get(EMBEDDING),
        head=None if head is None else head.T,
    )


def published_shapes(config: DraftConfig) -> dict[str, Shape]:
    """Name and shape of every tensor of a draft, embedding and head apart."""
    return {
        _published(name): tuple(reversed(leaf.shape)) if _is_kernel(name) else tuple(leaf.shape)
        for name, leaf in flatten(abstract_draft(config)).items()
    }


def _is_kernel(name: str) -> bool:
    return name.endswith(_KERNEL)


def _published(name: str) -> str:
    """In: `fc.kernel`, out: `fc.weight`; other names are the published ones."""
    return name.removesuffix(_KERNEL) + _PUBLISHED_KERNEL if _is_kernel(name) else name


def _ours(name: str, array: np.ndarray) -> np.ndarray:
    """Published matrices are `[out, in]`; ours are `[in, out]`."""
    return array.T if _is_kernel(name) else array


def _canonical(name: str) -> str:
    """The main name of a tensor."""
    bare = name.removeprefix(_PREFIX)
    return _ALIASES.get(bare, bare)
