"""What a frozen model shows of a text: inputs of its indexers, and the attention they should have.

Only some queries of a text are kept with their attention, a row as long as the text for each; but
all positions can be attended to. A file is written whole or not at all.
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float16, Int, Int32

from dhisparse_jax.configs.llama import FittedConfig
from dhisparse_jax.models.glm.attend import causal_weights, map_query_chunks
from dhisparse_jax.models.llama.attend import Seen, causal
from dhisparse_jax.models.llama.model import Heads, LlamaModel
from dhisparse_jax.models.llama.whole import LayerView, run_layers

_CHUNK = 64
"""Queries whose attention is there at once, with all heads."""


class Captured(NamedTuple):
    """One text. Half precision: a fit does not need more.

    Attributes:
        inputs: Normalised input of the first layer of each group.
        positions: The queries that were kept, ascending.
        targets: Their attention, averaged over the heads and layers of each group.
    """

    inputs: Float16[np.ndarray, "groups s width"]
    positions: Int32[np.ndarray, " queries"]
    targets: Float16[np.ndarray, "groups queries s"]


def draw_positions(
    length: int, count: int, rng: np.random.Generator
) -> Int32[np.ndarray, " queries"]:
    """Some positions of a text, ascending, evenly likely."""
    return np.sort(rng.choice(length, min(count, length), replace=False)).astype(np.int32)


def capture(
    model: LlamaModel,
    config: FittedConfig,
    tokens: Int[np.ndarray, " s"],
    positions: Int32[np.ndarray, " queries"],
) -> Captured:
    """Run a text through the frozen model, which attends to everything."""
    inputs: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    everything = causal(len(tokens))
    members = [
        (group, size) for group, size in enumerate(config.layers_per_group) for _ in range(size)
    ]

    def look(view: LayerView) -> Seen:
        group, size = members[view.number]
        mean = np.asarray(_attention(view.heads, jnp.asarray(positions), model.config.scale)) / size
        if group == len(inputs):
            inputs.append(np.asarray(view.normed, np.float16))
            targets.append(mean)
        else:
            targets[group] += mean
        return everything

    run_layers(model, jnp.asarray(tokens), look)
    return Captured(np.stack(inputs), positions, np.stack(targets).astype(np.float16))


@partial(jax.jit, static_argnums=2)
def _attention(
    heads: Heads, positions: Int[Array, " queries"], scale: float
) -> Float[Array, "queries s"]:
    """Attention of some queries, averaged over the heads."""
    shared = heads.queries.shape[1] // heads.keys.shape[1]
    keys = jnp.repeat(heads.keys, shared, axis=1)[None]

    def mean(queries: jax.Array, positions: jax.Array) -> jax.Array:
        return causal_weights(queries, keys, positions, scale).mean(axis=1)

    chosen = heads.queries[positions][None], positions[None]
    return map_query_chunks(mean, *chosen, chunk=_CHUNK)[0]


def save_captured(path: Path, captured: Captured) -> None:
    """Write a text's file; one that is there is replaced when the new one is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.stem}.new.npz")
    np.savez(fresh, **captured._asdict())
    fresh.replace(path)


def load_captured(path: Path) -> Captured:
    """Read what `save_captured` wrote."""
    with np.load(path) as found:
        return Captured(**{name: found[name] for name in Captured._fields})
