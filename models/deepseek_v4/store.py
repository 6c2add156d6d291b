"""What the layers of a group keep beside records: names for the arrays that the library holds."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from dhisparse_jax.configs.deepseek_v4 import ALL, SELECTED, V4Config
from dhisparse_jax.geometry import Geometry, Kept, RowFormat
from dhisparse_jax.hierarchy.formats import stored_rows
from dhisparse_jax.hierarchy.kept import attend_kept, keep, kept_rows
from dhisparse_jax.hierarchy.retrieve import Attended
from dhisparse_jax.model import Beside, KeptLeaves

NEAR, RAW, INDEX_RAW, FAR = "near", "raw", "index_raw", "far"
"""Its window; of the newest tokens what its compressor needs, and that of its indexer; entries."""


ROW_UNIT = 4
"""Words; see `kept_words`."""


class Key(NamedTuple):
    """What a layer keeps.

    Attributes:
        layer: number of the layer.
        what: one of the names above.
    """

    layer: int
    what: str


@dataclasses.dataclass(frozen=True)
class Store:
    """What the layers of one group keep. Writing gives a new one.

    Attributes:
        geometry: of the model.
        kept: what each array is.
        leaves: the arrays.
        beside: what the library gave with them.
    """

    geometry: Geometry
    kept: Mapping[Key, Kept]
    leaves: Mapping[Key, Shaped[Array, "R _ _"]]
    beside: Beside

    def put(self, key: Key, index: Int[Array, "R t"], rows: Shaped[Array, "R t width"]) -> "Store":
        """Write rows at positions, or at numbers of entries."""
        leaf = keep(self.leaves[key], self.kept[key], index, rows, self.beside.writes)
        return dataclasses.replace(self, leaves={**self.leaves, key: leaf})

    def put_rows(
        self, key: Key, index: Int[Array, "R t"], rows: Float[Array, "R t width"]
    ) -> "Store":
        """Write rows that attention reads, in their format."""
        kept = self.kept[key]
        words = stored_rows(kept.row or self.geometry.row, rows)
        return self.put(key, index, with_room(words, kept.width))

    def rows(self, key: Key, index: Int[Array, "R *t"]) -> Shaped[Array, "R *t width"]:
        """Rows at positions; undefined before the first."""
        return kept_rows(self.leaves[key], self.kept[key], index)

    def newest(self, key: Key, positions: Int[Array, "R T"]) -> Int[Array, "R T span"]:
        """The positions up to each one that are kept; negative before the first."""
        span = self.kept[key].span
        assert span is not None  # the newest positions, not all
        back = jnp.arange(span, dtype=jnp.int32).reshape(1, 1, -1)
        return positions[..., None] - back

    def attend(
        self,
        key: Key,
        index: Int[Array, "R T K"],
        query: Float[Array, "R T H width"],
        sinks: Float[Array, " H"] | None = None,
    ) -> Attended:
        """Attention over rows at positions, or at numbers of entries; NO_SLOT masks."""
        leaf, kept = self.leaves[key], self.kept[key]
        return Attended(*attend_kept(leaf, kept, self.geometry, index, query, sinks))

    def count(self, key: Key) -> int:
        """How many rows of a request there are."""
        return self.leaves[key].shape[1]

    @property
    def arrays(self) -> KeptLeaves:
        """The arrays, in the order of the geometry."""
        return tuple(self.leaves[key] for key in self.kept)


def open_store(geometry: Geometry, kept: Mapping[Key, Kept], beside: Beside) -> Store:
    """What the layers of one group keep."""
    return Store(geometry, kept, dict(zip(kept, beside.kept, strict=True)), beside)


def kept_words(row: RowFormat) -> int:
    """Words between rows that attention reads: kernels read them from multiples of 16 bytes on."""
    return -(-row.words // ROW_UNIT) * ROW_UNIT


def with_room(words: Int[Array, "*n words"], width: int) -> Int[Array, "*n width"]:
    """Rows of so many words."""
    missing = width - words.shape[-1]
    return jnp.pad(words, [(0, 0)] * (words.ndim - 1) + [(0, missing)])


def kept_by(config: V4Config, row: RowFormat, layers: tuple[int, ...]) -> dict[Key, Kept]:
    """What some layers keep, in order.

    Compression needs values and gates, of one stretch where stretches do not overlap, else of two,
    in twice the channels.
    """
    found: dict[Key, Kept] = {}
    words = kept_words(row)
    raw = lambda width, span: Kept(width=width, dtype="float32", span=span)
    for layer in layers:
        found[Key(layer, NEAR)] = Kept(width=words, dtype="int32", span=config.window)
        if config.layer_kinds[layer] == ALL:
            rate = config.all_rate
            found[Key(layer, RAW)] = raw(2 * config.head_dim, rate)
            found[Key(layer, FAR)] = Kept(width=words, dtype="int32", row=row, rate=rate)
        if config.layer_kinds[layer] == SELECTED:
            span = 2 * config.selected_rate
            found[Key(layer, RAW)] = raw(4 * config.head_dim, span)
            found[Key(layer, INDEX_RAW)] = raw(4 * config.index_dim, span)
    return found
