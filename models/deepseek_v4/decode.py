"""DeepSeek-V4 over the KV hierarchy: what the decode step and the prefill ask of a served model.

A group is a "selected" layer and those that follow it. The entries of the selected layer are its
pool's records; everything else that its layers need of a history is kept on the device: the window
of every layer, the entries of "all" layers, and what compressors need of unfinished stretches.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dhisparse_jax.configs.deepseek_v4 import V4Config, V4Sizes
from dhisparse_jax.geometry import FP8, Geometry, RowFormat
from dhisparse_jax.hierarchy.retrieve import Attended
from dhisparse_jax.hierarchy.select import IndexInputs
from dhisparse_jax.model import AttendFn, Beside, Opened, OpenFn, Params, Ran
from dhisparse_jax.models.deepseek_v4.attention import Projected, V4Attention
from dhisparse_jax.models.deepseek_v4.compressor import Compressor
from dhisparse_jax.models.deepseek_v4.hyper import collapsed, connected, mean_stream
from dhisparse_jax.models.deepseek_v4.indexer import Indexer
from dhisparse_jax.models.deepseek_v4.model import V4Model
from dhisparse_jax.models.deepseek_v4.store import (
    FAR,
    INDEX_RAW,
    RAW,
    Key,
    Store,
    kept_by,
    open_store,
)
from dhisparse_jax.models.deepseek_v4.window import Place, attend_window, merged, new_entries
from dhisparse_jax.models.history import in_basis, key_dtype, row_dtype, with_formats
from pallas_kernels.common.ids import masked
from pallas_kernels.common.scaled_rows import V4_ENTRY, ScaledRow


@dataclasses.dataclass(frozen=True)
class V4Served:
    """A DeepSeek-V4 model as pure functions of its weights.

    Attributes:
        config: sizes.
        graph: structure of the NNX model; hashable, so that it can be static under `jit`.
        dtype: of the computation, and of what is kept if `config` says no other.
    """

    config: V4Config
    graph: nnx.GraphDef[V4Model]
    dtype: str

    @property
    def geometry(self) -> Geometry:
        """One pool per "selected" layer; a record is one entry."""
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
        """The streams before the first layer, side by side."""
        return nnx.merge(self.graph, params).embed(tokens).reshape(*tokens.shape, -1)

    def logits(self, params: Params, x: Float[Array, "R T D"]) -> Float[Array, "R T V"]:
        """Final collapse, norm and head, float32."""
        return nnx.merge(self.graph, params).logits(self._streams(x))

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
        """All layers of one group; `x` holds the streams side by side.

        A drafter reads the mean of the streams after a layer (DeepSeek-V4-Flash-DSpark).
        """
        assert beside is not None  # the geometry says that something is kept
        layers = nnx.merge(self.graph, params).layers
        geometry, group = self.geometry, self.config.groups[pool]
        store = open_store(geometry, kept_by(self.config, geometry.row, group), beside)
        streams = self._streams(x)
        opened: Any = None
        read: list[Float[Array, "R T width"]] = []
        for number in group:
            block, place = layers[number], Place(number, positions, open_group, attend)
            mixing = block.attention_hyper.mixing(streams)
            inner = block.attention_norm(collapsed(streams, mixing.pre))
            update, store, opened = _attention(block.attention, inner, place, store, opened)
            streams = connected(streams, update, mixing)
            mixing = block.mlp_hyper.mixing(streams)
            inner = block.mlp_norm(collapsed(streams, mixing.pre))
            streams = connected(streams, block.mlp(inner, beside.tokens), mixing)
            if number - group[0] in taps:
                read.append(mean_stream(streams))
        return Ran(streams.reshape(x.shape), tuple(read), opened, store.arrays)

    def _streams(self, x: Float[Array, "R T D"]) -> Float[Array, "R T streams width"]:
        return x.reshape(*x.shape[:-1], self.config.streams, -1)


def geometry_of(config: V4Config, dtype: str) -> Geometry:
    """What a model needs of a hierarchy whose computation has a dtype."""
    row, form = row_format(config, dtype), config.index_format
    return Geometry(
        row=row,
        layers_per_pool=(1,) * len(config.groups),
        top_k=config.index_top_k,
        index_width=config.index_dim,
        index_dtype=key_dtype(form, dtype),
        index_power_scales=form == FP8,
        scale=config.attention_scale,
        rates=(config.selected_rate,) * len(config.groups),
        kept=tuple(tuple(kept_by(config, row, group).values()) for group in config.groups),
        group_layers=tuple(map(len, config.groups)),
        feature_width=config.hidden_size,
    )


def row_format(config: V4Sizes, dtype: str) -> RowFormat:
    """Rows and entries. FP8 as published: a power of two as scale for each 64 unrotated numbers."""
    width, rest = config.head_dim, config.rope_dim
    if config.kv_format != FP8:
        return RowFormat(width, width, row_dtype(config.kv_format, dtype))
    group = math.gcd(width - rest, V4_ENTRY.group)
    return RowFormat(width, width, ScaledRow(width - rest, group, "e8m0", rest))


def _attention(
    attention: V4Attention,
    x: Float[Array, "R T width"],
    place: Place,
    store: Store,
    opened: Any,  # noqa: ANN401  # the library's, handed on
) -> tuple[Float[Array, "R T width"], Store, Any]:
    """The residual update of one layer, and what its group keeps and has opened now."""
    projected = attention.project(x, place.positions)
    found, store = attend_window(attention, projected, place, store)
    if attention.compressor is not None:
        rate = attention.compressor.rate
        entry = new_entries(place.positions, rate)
        entries, store = _compress(attention.compressor, RAW, x, entry, place, store)
        if attention.indexer is None:
            far, store = _attend_all(entries, entry, projected, place, store, rate)
        else:
            index, store = _index(attention.indexer, x, entry, projected, place, store)
            index = in_basis(index, store.geometry)
            far, opened = place.attend(place.open_group(index), 0, entries, projected.query)
        found = merged(found, far)
    return attention.output(found.values, place.positions), store, opened


def _compress(
    compressor: Compressor,
    what: str,
    x: Float[Array, "R T width"],
    entry: Int[Array, "R E"],
    place: Place,
    store: Store,
) -> tuple[Float[Array, "R E entry"], Store]:
    """Entries that the new tokens can complete; those that they do not complete mean nothing."""
    key = Key(place.layer, what)
    store = store.put(key, place.positions, compressor.raw(x, place.positions))
    summed = compressor.summed_positions(entry)
    return compressor.entries(store.rows(key, summed), summed >= 0, entry), store


def _attend_all(
    entries: Float[Array, "R E width"],
    entry: Int[Array, "R E"],
    projected: Projected,
    place: Place,
    store: Store,
    rate: int,
) -> tuple[Attended, Store]:
    """Attention over all entries that are complete at each query's position."""
    key = Key(place.layer, FAR)
    store = store.put_rows(key, entry, entries)
    every = jnp.arange(store.count(key), dtype=jnp.int32).reshape(1, 1, -1)
    seen = every < (place.positions[..., None] + 1) // rate
    index = masked(jnp.broadcast_to(every, seen.shape), seen)
    return store.attend(key, index, projected.query), store


def _index(
    indexer: Indexer,
    x: Float[Array, "R T width"],
    entry: Int[Array, "R E"],
    projected: Projected,
    place: Place,
    store: Store,
) -> tuple[IndexInputs, Store]:
    keys, store = _compress(indexer.compressor, INDEX_RAW, x, entry, place, store)
    queries = indexer.queries(projected.q_lora, place.positions)
    return IndexInputs(queries=queries, weights=indexer.weights(x), keys=keys), store


def serve(
    model: V4Model, dtype: str, kv_format: str | None = None, index_format: str | None = None
) -> tuple[V4Served, Params]:
    """Split an NNX model into what is static and its weights.

    Args:
        model: the model.
        dtype: of its computation: "float32" for verification.
        kv_format: format of rows and entries; None: what the model's configuration says.
        index_format: format of index keys; None: what the model's configuration says.

    Returns:
        The served model, and the weights to pass to its functions.

    Raises:
        UserError: there is no such format, or it is not possible with the sizes of the model.
    """
    graph, params = nnx.split(model)
    config = with_formats(model.config, kv_format, index_format)
    return V4Served(config=config, graph=graph, dtype=dtype), params
