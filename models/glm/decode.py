"""GLM-5.x over the KV hierarchy: what the decode step and the prefill ask of a served model.

Uses the library's public surface only, as any other Flax model would: `open_group` once per
selection group, `attend` once per layer. See `models.glm.dense` for the same model without a cache.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.geometry import FP8, Geometry, RowFormat
from dhisparse_jax.hierarchy.select import IndexInputs
from dhisparse_jax.model import AttendFn, Beside, Opened, OpenFn, Params, Ran
from dhisparse_jax.models.glm.indexer import Indexer
from dhisparse_jax.models.glm.model import GlmModel
from dhisparse_jax.models.history import in_basis, key_dtype, row_dtype, with_formats


def geometry_of(config: GlmConfig, dtype: str) -> Geometry:
    """What a model of these sizes needs of a hierarchy, computing in `dtype`."""
    index = config.index_format
    return Geometry(
        row=_row_of(config, dtype),
        layers_per_pool=tuple(len(group) for group in config.groups),
        top_k=config.index_top_k,
        index_width=config.index_dim,
        index_dtype=key_dtype(index, dtype),
        scale=config.attention_scale,
        index_power_scales=index == FP8 and config.power_scales,
    )


def _row_of(config: GlmConfig, dtype: str) -> RowFormat:
    if config.kv_format == FP8:
        return RowFormat.fp8(
            config.kv_lora_rank, config.qk_rope_dim, power_scales=config.power_scales
        )
    stored = row_dtype(config.kv_format, dtype)
    return RowFormat(width=config.row_dim, value_width=config.kv_lora_rank, dtype=stored)


@dataclasses.dataclass(frozen=True)
class GlmServed:
    """A GLM model as pure functions of its weights.

    Attributes:
        config: sizes.
        graph: structure of the NNX model; hashable, so that it can be static under `jit`.
        dtype: of the computation, and of what the hierarchy keeps if `config` says no other.
    """

    config: GlmConfig
    graph: nnx.GraphDef[GlmModel]
    dtype: str

    @property
    def geometry(self) -> Geometry:
        """One pool per selection group; a row is the latent and the rotated key of one token."""
        return geometry_of(self.config, self.dtype)

    @property
    def context(self) -> int:
        """Most positions the model can use."""
        return self.config.context

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.config.vocab_size

    def embed(self, params: Params, tokens: Int[Array, "R T"]) -> Float[Array, "R T D"]:
        """Token embeddings."""
        return nnx.merge(self.graph, params).embed(tokens)

    def logits(self, params: Params, x: Float[Array, "R T D"]) -> Float[Array, "R T V"]:
        """Final norm and head, float32."""
        return nnx.merge(self.graph, params).logits(x)

    def run_group(
        self,
        params: Params,
        pool: int,
        x: Float[Array, "R T D"],
        positions: Int[Array, "R T"],
        open_group: OpenFn[Opened],
        attend: AttendFn[Opened],
        taps: tuple[int, ...] = (),
        beside: Beside | None = None,
    ) -> Ran[Opened]:
        """All layers of one selection group; the first one has the indexer."""
        layers = nnx.merge(self.graph, params).layers
        opened: Any = None
        tapped = []
        for place, number in enumerate(self.config.groups[pool]):
            block = layers[number]
            normed = block.input_norm(x)
            projected = block.attention.project(normed, positions)
            if place == 0:
                index = _index_inputs(block.indexer, normed, projected.q_lora, positions)
                opened = open_group(in_basis(index, self.geometry))
            query = jnp.concatenate((projected.q_latent, projected.q_rope), axis=-1)
            attended, opened = attend(opened, place, projected.row, query)
            x = x + block.attention.combine(attended.values)
            x = x + block.mlp(block.post_norm(x))
            if place in taps:
                tapped.append(x)
        return Ran(x, tuple(tapped), opened)


def _index_inputs(
    indexer: Indexer | None,
    normed: Float[Array, "R T D"],
    q_lora: Float[Array, "R T q_lora"],
    positions: Int[Array, "R T"],
) -> IndexInputs:
    assert indexer is not None  # every group starts with a layer that has one
    return IndexInputs(
        queries=indexer.queries(q_lora, positions),
        weights=indexer.weights(normed),
        keys=indexer.keys(normed, positions),
    )


def serve(
    model: GlmModel,
    dtype: str,
    kv_format: str | None = None,
    index_format: str | None = None,
) -> tuple[GlmServed, Params]:
    """Split an NNX model into what is static and its weights.

    Args:
        model: the model.
        dtype: of its computation: "float32" for verification.
        kv_format: format of rows; None: what the model's configuration says.
        index_format: format of index keys; None: what the model's configuration says.

    Returns:
        The served model, and the weights to pass to its functions.

    Raises:
        UserError: there is no such format, or it is not possible with the sizes of the model.
    """
    graph, params = nnx.split(model)
    config = with_formats(model.config, kv_format, index_format)
    return GlmServed(config=config, graph=graph, dtype=dtype), params
