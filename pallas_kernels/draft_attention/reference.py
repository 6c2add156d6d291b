"""The same in plain jnp, and for blocks over any context."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.draft_attention.types import KeysValues, RingSeen, Seen


def draft_attention(
    queries: Float[Array, "R T H dim"],
    ring: KeysValues,
    own: KeysValues,
    seen: RingSeen,
    layer: int | Int[Array, ""],
) -> Float[Array, "R T H dim"]:
    """See `api.draft_attention`."""
    capacity = ring.keys.shape[2]
    slot = jnp.arange(capacity, dtype=jnp.int32)[None]
    age = (seen.next[:, None] - 1 - slot) % capacity  # 0 is the newest position
    shown = age[:, None] < seen.counts[..., None]
    heads = attend_block(
        queries[:, None],
        KeysValues(*(part[:, None] for part in own)),
        KeysValues(*(part[:, layer] for part in ring)),
        Seen(shown[:, None], seen.block),
    )
    return heads[:, 0]


def attend_block(
    queries: Float[Array, "b a t H dim"],
    own: KeysValues,
    context: KeysValues,
    seen: Seen,
) -> Float[Array, "b a t H dim"]:
    """Attention of each row over what it sees of a context and of its block.

    Args:
        queries: of `a` blocks of `t` rows in each of `b` sequences.
        own: `[b, a, t, kv, dim]` of the block's rows. A row sees itself, so no row sees nothing.
        context: `[b, s, kv, dim]`, which all blocks of a sequence share; all of it finite.
        seen: what each row sees.
    """
    kv, dim = context.keys.shape[-2:]
    grouped = queries.reshape(*queries.shape[:3], kv, -1, dim)
    wide = jnp.float32
    logits = jnp.concatenate(
        (
            jnp.einsum("batkgd,bskd->bakgts", grouped, context.keys, preferred_element_type=wide),
            jnp.einsum("batkgd,baukd->bakgtu", grouped, own.keys, preferred_element_type=wide),
        ),
        axis=-1,
    )
    block = jnp.broadcast_to(seen.block[None, None], (*seen.context.shape[:3], len(seen.block)))
    mask = jnp.concatenate((seen.context, block), axis=-1)[:, :, None, None]
    weights = jax.nn.softmax(jnp.where(mask, logits * dim**-0.5, -jnp.inf), axis=-1)
    weights = weights.astype(own.values.dtype)
    length = seen.context.shape[-1]
    values = jnp.einsum("bakgts,bskd->batkgd", weights[..., :length], context.values)
    values = values + jnp.einsum("bakgtu,baukd->batkgd", weights[..., length:], own.values)
    return values.reshape(queries.shape)
