"""Text that the target continues by itself: a prefix of real text, then its own tokens.

All sequences of a batch run in lockstep from position 0, over plain arrays: a prefix is read token
by token like everything else, so one small loop serves every prefix length.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key, UInt8

from dhisparse_jax.hierarchy.retrieve import Attended
from dhisparse_jax.hierarchy.select import IndexInputs
from dhisparse_jax.model import Params
from dhisparse_jax.models.glm.attend import select_top_k, sparse_weights
from dhisparse_jax.models.glm.decode import GlmServed
from dhisparse_jax.pytree import state as pytree


class Prompts(NamedTuple):
    """What to continue.

    Attributes:
        text: Real text, of which only the prefix is read.
        prefix: Bytes of it that stay.
        temperature: 0 is greedy.
    """

    text: UInt8[Array, "b s"]
    prefix: Int[Array, " b"]
    temperature: Float[Array, " b"]


@pytree
class _Cache:
    """Rows of every layer and index keys of every selection group."""

    rows: tuple[Float[Array, "b s width"], ...]
    keys: tuple[Float[Array, "b s index"], ...]


@pytree
class _Opened:
    """A selection group in the middle of a step."""

    cache: _Cache
    selected: Int[Array, "b 1 chosen"]


def continue_text(
    served: GlmServed, params: Params, prompts: Prompts, key: Key[Array, ""]
) -> UInt8[Array, "b s"]:
    """Every sequence with all behind its prefix replaced by the target's own tokens."""
    batch, length = prompts.text.shape
    geometry = served.geometry
    empty = lambda width: jnp.zeros((batch, length, width), served.dtype)
    cache = _Cache(
        rows=tuple(empty(geometry.row.width) for _ in range(served.config.num_layers)),
        keys=tuple(empty(geometry.index_width) for _ in geometry.layers_per_pool),
    )

    def step(
        carry: tuple[_Cache, jax.Array], position: jax.Array
    ) -> tuple[tuple[_Cache, jax.Array], jax.Array]:
        cache, tokens = carry
        logits, cache = _read(served, params, cache, tokens, position)
        chosen = _choose(logits, prompts.temperature, jax.random.fold_in(key, position))
        at = jnp.minimum(position + 1, length - 1)
        given = lax.dynamic_index_in_dim(prompts.text, at, 1, keepdims=False).astype(jnp.int32)
        following = jnp.where(at < prompts.prefix, given, chosen)
        return (cache, following), tokens.astype(jnp.uint8)

    first = prompts.text[:, 0].astype(jnp.int32)
    _, tokens = lax.scan(step, (cache, first), jnp.arange(length, dtype=jnp.int32))
    return tokens.T


def _choose(
    logits: Float[Array, "b vocab"], temperature: Float[Array, " b"], key: Key[Array, ""]
) -> Int[Array, " b"]:
    """The best token, or a draw at the row's temperature."""
    noise = jax.random.gumbel(key, logits.shape, jnp.float32)
    return jnp.argmax(logits + temperature[:, None] * noise, axis=-1).astype(jnp.int32)


def _read(
    served: GlmServed,
    params: Params,
    cache: _Cache,
    tokens: Int[Array, " b"],
    position: Int[Array, ""],
) -> tuple[Float[Array, "b vocab"], _Cache]:
    """Logits after one more token of every sequence."""
    x = served.embed(params, tokens[:, None])
    positions = jnp.broadcast_to(position, (len(tokens), 1))
    first = 0
    for pool, layers in enumerate(served.geometry.layers_per_pool):
        x, opened = _run_group(served, params, pool, x, positions, (cache, first))
        cache, first = opened.cache, first + layers
    return served.logits(params, x)[:, 0], cache


def _run_group(
    served: GlmServed,
    params: Params,
    pool: int,
    x: Float[Array, "b 1 d"],
    positions: Int[Array, "b 1"],
    where: tuple[_Cache, int],
) -> tuple[Float[Array, "b 1 d"], _Opened]:
    """One selection group; `where` is the cache, and the number of the group's first layer."""
    cache, first = where

    def open_group(index: IndexInputs, opened: _Opened | None = None) -> _Opened:
        assert opened is None  # these models select once per group
        assert index.keys is not None
        keys = _put(cache.keys[pool], index.keys, positions)
        selected = select_top_k(
            index.queries,
            keys,
            index.weights,
            positions,
            count=served.geometry.top_k,
            chunk=1,
        )
        now = _Cache(rows=cache.rows, keys=_replace(cache.keys, pool, keys))
        return _Opened(cache=now, selected=selected)

    attend = partial(_attend, served, first, positions)
    ran = served.run_group(params, pool, x, positions, open_group, attend)
    return ran.x, ran.opened


def _attend(
    served: GlmServed,
    first: int,
    positions: Int[Array, "b 1"],
    opened: _Opened,
    layer: int,
    row: Float[Array, "b 1 width"] | None,
    query: Float[Array, "b 1 heads width"],
) -> tuple[Attended, _Opened]:
    """Store the row of one layer, and attend to the selected ones."""
    assert row is not None  # every layer of these models has its own
    latent, number = served.geometry.row.value_width, first + layer
    rows = _put(opened.cache.rows[number], row, positions)
    chosen = jax.vmap(lambda r, s: r[s])(rows, jnp.maximum(opened.selected, 0))
    weights = sparse_weights(
        query[..., :latent],
        query[..., latent:],
        chosen,
        opened.selected >= 0,
        served.geometry.scale,
    )
    values = jnp.einsum("bthk,btkr->bthr", weights.astype(rows.dtype), chosen[..., :latent])
    cache = _Cache(rows=_replace(opened.cache.rows, number, rows), keys=opened.cache.keys)
    nobody_asks = jnp.full(values.shape[:-1], jnp.nan, jnp.float32)
    return Attended(values, nobody_asks), _Opened(cache=cache, selected=opened.selected)


def _put(
    array: Float[Array, "b s width"], new: Float[Array, "b 1 width"], positions: Int[Array, "b 1"]
) -> Float[Array, "b s width"]:
    """`array` with one position of every sequence written; all stand at the same one."""
    zero = jnp.int32(0)
    return lax.dynamic_update_slice(array, new.astype(array.dtype), (zero, positions[0, 0], zero))


def _replace(parts: tuple[jax.Array, ...], number: int, part: jax.Array) -> tuple[jax.Array, ...]:
    return (*parts[:number], part, *parts[number + 1 :])
