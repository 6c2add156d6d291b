"""Indexers that were fitted to a model without any: one for each group of its layers.

Each reads the normalised input of its group's first layer and selects for all layers of the group.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dhisparse_jax.configs.llama import FittedConfig, LlamaConfig
from dhisparse_jax.configs.values import config_of
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.checkpoint import (
    CONFIG_FILE,
    OWN_WEIGHTS,
    restore_weights,
    save_json,
    save_weights,
)
from dhisparse_jax.models.glm.indexer import Indexer
from dhisparse_jax.models.hf_config import read_json
from dhisparse_jax.models.llama.attend import Seen, selected
from dhisparse_jax.models.llama.whole import LayerView, Look
from dhisparse_jax.models.params import Nested, cast_like, fill, flatten, params_of, unflatten

BUNDLED = {"smollm2": Path(__file__).parents[1] / "smollm2"}
"""Indexers that are in the package, by the model they were fitted to."""


class FittedIndexers(nnx.Module):
    """The indexers of all groups.

    Args:
        config: Sizes.
        rngs: Source of the initial values.
        dtype: Compute dtype; scores are float32 whatever it is.
    """

    def __init__(
        self, config: FittedConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype | type = jnp.float32
    ) -> None:
        self.config = config
        self.groups = nnx.List(
            Indexer(config, dtype=jnp.dtype(dtype), rngs=rngs) for _ in config.layers_per_group
        )


class Scored(NamedTuple):
    """What index scores are made of (`models.glm.indexer.index_scores`)."""

    queries: Float[Array, "*batch index_heads index_dim"]
    keys: Float[Array, "*batch index_dim"]
    weights: Float[Array, "*batch index_heads"]


def scored(
    indexer: Indexer, normed: Float[Array, "*batch width"], positions: Int[Array, "*batch"]
) -> Scored:
    """What one indexer makes of the normalised input of its group's first layer."""
    return Scored(
        indexer.queries(normed, positions),
        indexer.keys(normed, positions),
        indexer.weights(normed),
    )


def selecting(indexers: FittedIndexers, count: int) -> Look:
    """Every layer attends to the `count` positions that its group's indexer scores highest."""
    group_of = {layer: group for group, layer in enumerate(indexers.config.firsts)}
    held: list[Seen] = []

    def look(view: LayerView) -> Seen:
        if view.number in group_of:
            held[:] = [_select(indexers.groups[group_of[view.number]], view.normed, count)]
        return held[0]

    return look


@nnx.jit(static_argnums=2)
def _select(indexer: Indexer, normed: jax.Array, count: int) -> jax.Array:
    queries, keys, weights = scored(indexer, normed, jnp.arange(normed.shape[0]))
    return selected(queries, keys, weights, count)


def abstract_indexers(config: FittedConfig) -> Nested:
    """Shapes and dtypes of their weights; nothing is allocated."""
    return params_of(nnx.eval_shape(lambda: FittedIndexers(config, rngs=nnx.Rngs(0))))


def save_indexers(directory: Path, config: FittedConfig, params: Nested) -> None:
    """Write `config.json` and the weights in `config.param_dtype`, replacing what is there."""
    weights = flatten(cast_like(params, abstract_indexers(config)))
    save_weights(directory / OWN_WEIGHTS, weights)
    save_json(directory / CONFIG_FILE, dataclasses.asdict(config))


def load_indexers(directory: Path, model: LlamaConfig) -> FittedIndexers:
    """Read what `save_indexers` wrote.

    Raises:
        UserError: nothing is there, it is damaged, or it was fitted to a model of other sizes.
    """
    directory = directory.absolute()
    config = config_of(FittedConfig, read_json(directory / CONFIG_FILE))
    layers = sum(config.layers_per_group)
    if (config.hidden_size, layers) != (model.hidden_size, model.num_layers):
        raise UserError(
            f"the indexers in {directory} are for {layers} layers of {config.hidden_size}; the "
            f"model has {model.num_layers} of {model.hidden_size}"
        )
    like = abstract_indexers(config)
    params = unflatten(restore_weights(directory / OWN_WEIGHTS, flatten(like)), like)
    return fill(lambda: FittedIndexers(config, rngs=nnx.Rngs(0)), params)
