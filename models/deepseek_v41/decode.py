"""DeepSeek-V4.1 over the KV hierarchy: what the decode step and the prefill ask of a served model.

A group is a source of entries and the layers that attend to these. The entries are its pool's
records, one row each, which all its layers share; some of the layers select, each for those that
follow it. What else layers need of a history is kept on the device: the window of each, what a
source needs of an unfinished stretch, and the last tokens, for n-grams.

Single-pass connections: what the streams say before a sublayer weights them for the next one. These
weights go from group to group beside the streams.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dhisparse_jax.configs.deepseek_v41 import V41Config
from dhisparse_jax.geometry import FP4, FP8, Candidates, Geometry, Kept, RowFormat
from dhisparse_jax.hierarchy.select import IndexInputs
from dhisparse_jax.model import AttendFn, Beside, Opened, OpenFn, Params, Ran
from dhisparse_jax.models.deepseek_v4.attention import Projected
from dhisparse_jax.models.deepseek_v4.decode import row_format
from dhisparse_jax.models.deepseek_v4.hyper import mean_stream
from dhisparse_jax.models.deepseek_v4.store import NEAR, RAW, Key, Store, kept_words, open_store
from dhisparse_jax.models.deepseek_v4.window import Place, attend_window, merged, new_entries
from dhisparse_jax.models.deepseek_v41.attention import EntrySource, V41Attention
from dhisparse_jax.models.deepseek_v41.model import V41Model
from dhisparse_jax.models.deepseek_v41.streams import Carried, after, before, packed, unpacked
from dhisparse_jax.models.history import key_dtype, with_formats
from pallas_kernels.common.scaled_rows import V41_ENTRY, V41_WINDOW

TOKENS = "tokens"
"""The last token ids of a text, kept for the memory before a layer."""


class _New(NamedTuple):
    """New entries of a source, and their index keys."""

    entries: Float[Array, "R E width"] | None
    keys: Float[Array, "R E index"] | None


_NOTHING_NEW = _New(None, None)


@dataclasses.dataclass(frozen=True)
class V41Served:
    """A DeepSeek-V4.1 model as pure functions of its weights.

    Attributes:
        config: sizes.
        graph: structure of the NNX model; hashable, so that it can be static under `jit`.
        dtype: of the computation, and of what is kept if `config` says no other.
    """

    config: V41Config
    graph: nnx.GraphDef[V41Model]
    dtype: str

    @property
    def geometry(self) -> Geometry:
        """One pool per source of entries; a record is one entry."""
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
        """The streams before the first layer, and that the first one is the first input."""
        streams = nnx.merge(self.graph, params).embed(tokens)
        first = jnp.arange(self.config.streams) == 0
        pre = jnp.broadcast_to(first.astype(jnp.float32), streams.shape[:-1])
        return packed(Carried(streams, pre))

    def logits(self, params: Params, x: Float[Array, "R T D"]) -> Float[Array, "R T V"]:
        """Final collapse, norm and head, float32."""
        carried = unpacked(x, self.config.streams)
        return nnx.merge(self.graph, params).logits(carried.streams, carried.pre)

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
        """All layers of one group; see `packed` for `x`.

        A drafter reads the mean of the streams that enter a layer's attention (DeepSeek-V4.1).
        """
        assert beside is not None  # the geometry says that something is kept
        model, geometry = nnx.merge(self.graph, params), self.geometry
        group = self.config.groups[pool]
        store = open_store(geometry, kept_by(self.config, self.dtype, group), beside)
        carried = unpacked(x, self.config.streams)
        opened: Any = None
        read: list[Float[Array, "R T width"]] = []
        for number in group:
            block, place = model.layers[number], Place(number, positions, open_group, attend)
            if block.engram is not None:
                with jax.named_scope("engram"):
                    words, store = _words(model, place, store)
                    carried = carried._replace(streams=block.engram(carried.streams, words))
            if number - group[0] in taps:
                read.append(mean_stream(carried.streams))
            mixing, inner = before(block.attention_hyper, block.attention_norm, carried)
            update, store, opened = _attention(block.attention, inner, place, store, opened)
            carried = after(carried, update, mixing)
            mixing, inner = before(block.mlp_hyper, block.mlp_norm, carried)
            carried = after(carried, block.mlp(inner, beside.tokens), mixing)
        return Ran(packed(carried), tuple(read), opened, store.arrays)


def geometry_of(config: V41Config, dtype: str) -> Geometry:
    """What a model needs of a hierarchy whose computation has a dtype."""
    row, form = entry_format(config, dtype), config.index_format
    sources = config.entry_sources
    rule = Candidates(block=config.candidate_block, count=config.candidate_blocks)
    return Geometry(
        row=row,
        layers_per_pool=(1,) * len(sources),
        top_k=config.index_top_k,
        index_width=config.index_dim,
        index_dtype=key_dtype(form, dtype),
        index_power_scales=form == FP8,
        scale=config.attention_scale,
        rates=tuple(config.rates[source] for source in sources),
        kept=tuple(tuple(kept_by(config, dtype, group).values()) for group in config.groups),
        candidates=tuple(rule if config.candidate_source == source else None for source in sources),
        group_layers=tuple(map(len, config.groups)),
        feature_width=config.hidden_size,
    )


def entry_format(config: V41Config, dtype: str) -> RowFormat:
    """Entries; as published with 4 bits and a scale for each 16 of all their numbers."""
    if config.kv_format != FP4:
        return row_format(config, dtype)
    width = config.head_dim
    group = math.gcd(width, V41_ENTRY.group)
    return RowFormat(width, width, dataclasses.replace(V41_ENTRY, quantised=width, group=group))


def window_format(config: V41Config, dtype: str) -> RowFormat:
    """Rows of windows; beside entries of 4 bits with 8, and a power of two for each 32 of them."""
    if config.kv_format != FP4:
        return row_format(config, dtype)
    width = config.head_dim
    group = math.gcd(width, V41_WINDOW.group)
    return RowFormat(width, width, dataclasses.replace(V41_WINDOW, quantised=width, group=group))


def kept_by(config: V41Config, dtype: str, layers: tuple[int, ...]) -> Mapping[Key, Kept]:
    """What some layers keep, in order: windows, values and gates of stretches, and tokens."""
    found: dict[Key, Kept] = {}
    row = window_format(config, dtype)
    for layer in layers:
        found[Key(layer, NEAR)] = Kept(
            width=kept_words(row), dtype="int32", row=row, span=config.window
        )
        rate = config.rates[layer]
        if layer in config.entry_sources and rate > 1:
            found[Key(layer, RAW)] = Kept(width=2 * config.head_dim, dtype="float32", span=rate)
        if layer in config.engram_layers:
            found[Key(layer, TOKENS)] = Kept(width=1, dtype="int32", span=config.engram_order)
    return found


def _words(model: V41Model, place: Place, store: Store) -> tuple[Int[Array, "R T order"], Store]:
    """What n-grams that end with the new tokens are made of, the newest first."""
    key = Key(place.layer, TOKENS)
    store = store.put(key, place.positions, store.beside.tokens[..., None])
    before = store.newest(key, place.positions)
    return model.words(store.rows(key, before)[..., 0], before >= 0), store


def _attention(
    attention: V41Attention,
    x: Float[Array, "R T width"],
    place: Place,
    store: Store,
    opened: Any,  # noqa: ANN401  # the library's, handed on
) -> tuple[Float[Array, "R T width"], Store, Any]:
    """The residual update of one layer, and what its group keeps and has opened now."""
    with jax.named_scope("project"):
        projected = attention.project(x, place.positions)
    with jax.named_scope("window"):
        found, store = attend_window(attention, projected, place, store)
    new = _NOTHING_NEW
    if attention.source is not None:
        with jax.named_scope("indexer"):
            new, store = _new_entries(attention.source, x, place, store)
    if attention.indexer is not None:
        with jax.named_scope("indexer"):
            index = _index(attention, x, projected, place, new)
        opened = place.open_group(index, None if new.keys is not None else opened)
    if attention.rate:
        far, opened = place.attend(opened, 0, new.entries, projected.query)
        with jax.named_scope("attend"):
            found = merged(found, far)
    with jax.named_scope("combine"):
        return attention.output(found.values, place.positions), store, opened


def _new_entries(
    source: EntrySource, x: Float[Array, "R T width"], place: Place, store: Store
) -> tuple[_New, Store]:
    """Those that the new tokens can complete; what they do not complete means nothing."""
    entry = new_entries(place.positions, source.rate)
    if source.rate == 1:
        latents = source.latents.of_tokens(x)
    else:
        key, summed = Key(place.layer, RAW), source.latents.summed_positions(entry)
        store = store.put(key, place.positions, source.latents.raw(x))
        latents = source.latents.of_stretches(store.rows(key, summed), summed >= 0)
    return _New(source.entries(latents, entry), source.keys(latents, entry)), store


def _index(
    attention: V41Attention,
    x: Float[Array, "R T width"],
    projected: Projected,
    place: Place,
    new: _New,
) -> IndexInputs:
    assert attention.indexer is not None  # the layer selects
    queries = attention.indexer.queries(projected.q_lora, place.positions)
    return IndexInputs(queries=queries, weights=attention.indexer.weights(x), keys=new.keys)


def serve(
    model: V41Model, dtype: str, kv_format: str | None = None, index_format: str | None = None
) -> tuple[V41Served, Params]:
    """Split an NNX model into what is static and its weights; see `models.glm.decode.serve`.

    Raises:
        UserError: there is no such format, or it is not possible with the sizes of the model.
    """
    graph, params = nnx.split(model)
    config = with_formats(model.config, kv_format, index_format)
    return V41Served(config=config, graph=graph, dtype=dtype), params
