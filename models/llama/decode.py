"""A Llama-like model with fitted indexers over the KV hierarchy, by `dhisparse_jax.plugin`.

It is then another model than the one that was published: its layers read the K rows that indexers
select, in place of all of them. Which policy runs it changes nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dhisparse_jax import plugin
from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.geometry import Geometry, RowFormat
from dhisparse_jax.hierarchy.select import IndexInputs
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.models.llama.attend import Seen
from dhisparse_jax.models.llama.indexers import FittedIndexers, scored, selecting
from dhisparse_jax.models.llama.model import LlamaModel
from dhisparse_jax.models.llama.whole import LayerView, run_layers
from dhisparse_jax.models.params import Nested, fill, params_of
from dhisparse_jax.plugin import OpenStep

Feed = Callable[[HierarchyState, jax.Array], tuple[HierarchyState, jax.Array]]
"""From a hierarchy and new tokens `[R, T]` to the hierarchy with them, and their logits."""


class Prompt(NamedTuple):
    """What a prompt leaves behind.

    Attributes:
        hidden: The residual stream after the last layer.
        rows: Keys and values of every layer, as `plugin.admit` takes them.
        keys: Index keys of every group.
    """

    hidden: Float[Array, "s width"]
    rows: list[tuple[jax.Array, jax.Array]]
    keys: list[jax.Array]


def geometry(model: LlamaModel, indexers: FittedIndexers, top_k: int) -> Geometry:
    """What is kept of a history: keys and values of every layer, and index keys of every group."""
    config = model.config
    dtype = model.dtype.name
    return Geometry(
        row=RowFormat.gqa(config.num_kv_heads, config.head_dim, dtype=dtype),
        layers_per_pool=indexers.config.layers_per_group,
        top_k=top_k,
        index_width=indexers.config.index_dim,
        index_dtype=dtype,
        scale=config.scale,
    )


def read_prompt(
    model: LlamaModel, indexers: FittedIndexers, tokens: Int[Array, " s"], top_k: int
) -> Prompt:
    """A whole prompt, each of whose positions reads the rows that a decode step would."""
    rows: list[tuple[jax.Array, jax.Array]] = []
    keys: list[jax.Array] = []
    select = selecting(indexers, top_k)
    firsts = indexers.config.firsts

    def look(view: LayerView) -> Seen:
        rows.append((view.heads.keys, view.heads.values))
        if view.number in firsts:
            indexer = indexers.groups[len(keys)]
            keys.append(indexer.keys(view.normed, jnp.arange(view.normed.shape[0])))
        return select(view)

    return Prompt(run_layers(model, tokens, look), rows, keys)


def decode_step(
    model: LlamaModel, indexers: FittedIndexers, tokens: Int[Array, "R T"], step: OpenStep
) -> tuple[Float[Array, "R T vocab"], OpenStep]:
    """Logits of new tokens; the open step takes the place of a cache.

    Args:
        model: The model.
        indexers: Fitted to it.
        tokens: The new tokens of every request.
        step: What `plugin.begin_step` gave; `plugin.end_step` takes what comes back.
    """
    x, positions = model.embed(tokens), step.positions
    group_of = {layer: group for group, layer in enumerate(indexers.config.firsts)}
    for number, layer in enumerate(model.layers):
        normed = layer.input_norm(x)
        queries, keys, values = layer.project(normed, positions)
        index = None
        if number in group_of:
            found = scored(indexers.groups[group_of[number]], normed, positions)
            index = IndexInputs(queries=found.queries, weights=found.weights, keys=found.keys)
        attended, step = plugin.attend(step, number, (keys, values), queries, select=index)
        x = layer.finish(x, attended.values)
    return model.logits(x), step


def feeder(model: LlamaModel, indexers: FittedIndexers, cfg: HierarchyConfig) -> Feed:
    """A compiled step that keeps all its tokens; the hierarchy that it is given is used up."""
    params = {"model": params_of(model), "indexers": params_of(indexers)}

    def feed(
        params: Nested, state: HierarchyState, tokens: jax.Array
    ) -> tuple[HierarchyState, jax.Array]:
        logits, step = decode_step(
            fill(
                lambda: LlamaModel(model.config, rngs=nnx.Rngs(0), dtype=model.dtype),
                params["model"],
            ),
            fill(lambda: FittedIndexers(indexers.config, rngs=nnx.Rngs(0)), params["indexers"]),
            tokens,
            plugin.begin_step(state, cfg),
        )
        return plugin.end_step(step), logits

    compiled = jax.jit(feed, donate_argnums=1)
    return lambda state, tokens: compiled(params, state, tokens)
