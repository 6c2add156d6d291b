"""Weights of one GPU's share of GLM-5.x, random, made on the device.

One of G decode GPUs with data-parallel attention and expert parallelism holds everything but the
routed experts whole, and 1 / G of those. Matrices are stored as published fp8 checkpoints store
them, [out, in] in e4m3, but with a float32 scale for each output channel where those have one for
each block of 128 x 128: the bytes are the same to 0.1 %, and the products of a matrix unit need no
scale inside a sum. Embedding, head, norms and router are bfloat16.

Numbers have a random sign, exponent bit and mantissa: magnitudes of 0.5 to 1.9, scaled so that
activations keep their size. Every layer's matrices are arrays of their own: a stack that a loop
slices is copied, slice after slice.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.pytree import state as pytree

FP8 = jnp.float8_e4m3fn
RANDOM_BITS, FIXED_BITS = 0x8F, 0x30
"""Of an e4m3 number: sign, lowest bit of the exponent, mantissa; and an exponent of -1 or 0."""

RMS = 1.15
"""Root of the mean square of such a number."""

E8M0 = jnp.float8_e8m0fnu

PACKED_RMS = 2.93
"""Root of the mean square of a random number of 4 bits."""

COUNTED = 128
"""Integers that random arrays of them count through: as many as any vocabulary has."""


@pytree
class Matrix:
    """A matrix, or one per expert or head: `numbers * scale`.

    Attributes:
        numbers: e4m3.
        scale: float32 of every output channel.
    """

    numbers: Float[Array, "*n out in"]
    scale: Float[Array, "*n out"]


@pytree
class Indexer:
    """The indexer of a selection group.

    Attributes:
        queries: query latent to all heads.
        keys: residual stream to the index key.
        key_norm: weight and bias of its layer norm.
        heads: residual stream to the weights of the heads.
    """

    queries: Matrix
    keys: Matrix
    key_norm: Float[Array, "2 index"]
    heads: Float[Array, "heads D"]


@pytree
class Mlp:
    """A gated MLP, or several."""

    gate_up: Matrix
    down: Matrix


@pytree
class Moe:
    """Router, the experts that are on this GPU, and the shared one."""

    router: Float[Array, "experts D"]
    bias: Float[Array, " experts"]
    experts: Mlp
    shared: Mlp


@pytree
class Layer:
    """One layer.

    Attributes:
        norms: before the attention, and before the MLP.
        latents: residual stream to query latent, then row.
        query_norm: of the query latent.
        row_norm: of the latent part of the row.
        queries: query latent to all heads.
        to_latent: query heads into the latent space (W_uk transposed, per head).
        from_latent: attended latents to values (W_uv, per head).
        out: values to the residual stream.
        indexer: of the first layer of a group, else None.
        mlp: dense, or experts.
    """

    norms: Float[Array, "2 D"]
    latents: Matrix
    query_norm: Float[Array, " q_lora"]
    row_norm: Float[Array, " latent"]
    queries: Matrix
    to_latent: Matrix
    from_latent: Matrix
    out: Matrix
    indexer: Indexer | None
    mlp: Mlp | Moe


@pytree
class Weights:
    """All of it."""

    embedding: Float[Array, "V D"]
    head: Float[Array, "D V"]
    norm: Float[Array, " D"]
    layers: tuple[Layer, ...]


def abstract_weights(config: GlmConfig, experts: int) -> Weights:
    """Shapes and dtypes, with so many of the routed experts per layer."""
    width, vocabulary = config.hidden_size, config.vocab_size
    return Weights(
        embedding=abstract_leaf((vocabulary, width)),
        head=abstract_leaf((width, vocabulary)),
        norm=abstract_leaf((width,)),
        layers=tuple(_layer(config, number, experts) for number in range(config.num_layers)),
    )


def _layer(config: GlmConfig, number: int, experts: int) -> Layer:
    width, heads, latent = config.hidden_size, config.num_heads, config.kv_lora_rank
    dense = number < config.num_dense_layers
    full = config.indexer_types[number] == "full"
    return Layer(
        norms=abstract_leaf((2, width)),
        latents=_matrix(config.q_lora_rank + config.row_dim, width),
        query_norm=abstract_leaf((config.q_lora_rank,)),
        row_norm=abstract_leaf((latent,)),
        queries=_matrix(heads * config.qk_dim, config.q_lora_rank),
        to_latent=_matrix(heads, latent, config.qk_nope_dim),
        from_latent=_matrix(heads, config.v_dim, latent),
        out=_matrix(width, heads * config.v_dim),
        indexer=_indexer(config) if full else None,
        mlp=_mlp(width, config.dense_intermediate_size) if dense else _moe(config, experts),
    )


def _indexer(config: GlmConfig) -> Indexer:
    return Indexer(
        queries=_matrix(config.index_heads * config.index_dim, config.q_lora_rank),
        keys=_matrix(config.index_dim, config.hidden_size),
        key_norm=abstract_leaf((2, config.index_dim)),
        heads=abstract_leaf((config.index_heads, config.hidden_size)),
    )


def _moe(config: GlmConfig, experts: int) -> Moe:
    width, inner = config.hidden_size, config.expert_intermediate_size
    return Moe(
        router=abstract_leaf((config.num_experts, width)),
        bias=abstract_leaf((config.num_experts,), jnp.float32),
        experts=_mlp(width, inner, experts),
        shared=_mlp(width, config.num_shared_experts * inner),
    )


def _mlp(width: int, inner: int, *several: int) -> Mlp:
    return Mlp(gate_up=_matrix(*several, 2 * inner, width), down=_matrix(*several, width, inner))


def _matrix(*shape: int) -> Any:  # noqa: ANN401  # shapes in place of arrays
    return Matrix(numbers=abstract_leaf(shape, FP8), scale=abstract_leaf(shape[:-1], jnp.float32))


def abstract_leaf(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Any:  # noqa: ANN401
    """A shape where a pytree asks for an array."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def random_weights(shapes: Weights, seed: int = 0) -> Weights:
    """All weights; layers that are alike are made by one program."""
    layers = [random_like(layer, seed + number + 1) for number, layer in enumerate(shapes.layers)]
    embedding, head, norm = random_like((shapes.embedding, shapes.head, shapes.norm), seed)
    return Weights(embedding=embedding, head=head, norm=norm, layers=tuple(layers))


class Kind(NamedTuple):
    """What an array is full of.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        mean: of numbers, or of the power of two that a scale is.
        spread: of numbers to both sides of it.
    """

    shape: tuple[int, ...]
    dtype: Any
    mean: float
    spread: float


def random_like(shapes: Any, seed: int | Array, fan_axis: int = -1) -> Any:  # noqa: ANN401  # any pytree
    """Random arrays of these shapes, made on the device.

    Scales of matrices keep activations at their size, vectors (norms) lie around 1, and other
    matrices have a variance of one over `fan_axis`. Numbers of 8 or 4 bits are any but NaN, and
    int32 ones count.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(shapes)
    inputs = {
        _module(path): leaf.shape[-1] * (2 if leaf.dtype == jnp.uint8 else 1)
        for path, leaf in flat
        if leaf.dtype in (FP8, jnp.uint8)
    }
    kinds = tuple(_kind(leaf, inputs.get(_module(path)), fan_axis) for path, leaf in flat)
    return jax.tree.unflatten(structure, _made(jnp.asarray(seed, jnp.uint32), kinds))


def _module(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a leaf belongs to; the value of a parameter to where that does."""
    return path[: -2 if path and getattr(path[-1], "name", None) == "value" else -1]


def _kind(leaf: Any, inputs: int | None, fan_axis: int) -> Kind:  # noqa: ANN401  # a shape
    shape, dtype = leaf.shape, leaf.dtype
    if dtype == E8M0:
        return Kind(shape, dtype, -math.log2(PACKED_RMS * math.sqrt(inputs or 1)), 0.5)
    if len(shape) < 2 or (inputs and dtype == jnp.float32):
        mean = 1 / (RMS * math.sqrt(inputs)) if inputs else 1.0
        return Kind(shape, dtype, mean, 0.1 * mean)
    return Kind(shape, dtype, 0.0, (3 / shape[fan_axis]) ** 0.5)


@partial(jax.jit, static_argnums=1)
def _made(seed: UInt32[Array, ""], kinds: tuple[Kind, ...]) -> list[Array]:
    keys = mixed(seed * 4096 + jnp.arange(len(kinds), dtype=jnp.uint32))
    return [_one(keys[number], kind) for number, kind in enumerate(kinds)]


def _one(
    key: UInt32[Array, ""],
    kind: Kind,
) -> Array:
    """One array. Words are hashed numbers: a generator would keep them all in memory first."""
    shape, dtype, mean, spread = kind
    if dtype == jnp.int32:
        return jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(shape) % COUNTED
    count = math.prod(shape[1:])
    number = jnp.arange(shape[0], dtype=jnp.uint32)[:, None] * jnp.uint32(count % 2**32)
    words = mixed(key ^ (number + jnp.arange(count, dtype=jnp.uint32)[None])).reshape(shape)
    if dtype == FP8:  # none of them is NaN
        bits = (words >> 24).astype(jnp.uint8) & RANDOM_BITS | FIXED_BITS
        return jax.lax.bitcast_convert_type(bits, FP8)
    if dtype == jnp.uint8:
        return (words >> 24).astype(jnp.uint8)
    number = mean + spread * ((words >> 8).astype(jnp.float32) * 2.0**-23 - 1.0)
    if dtype == E8M0:
        return jax.lax.bitcast_convert_type((127 + jnp.round(number)).astype(jnp.uint8), E8M0)
    return number.astype(dtype)


def mixed(word: UInt32[Array, "*n"]) -> UInt32[Array, "*n"]:
    """A hash of 32 bits: rounds of multiplication and shift, so that every bit counts."""
    for factor in (0x7FEB352D, 0x846CA68B):
        word = (word ^ (word >> 16)) * jnp.uint32(factor)
    return word ^ (word >> 16)
