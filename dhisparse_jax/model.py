"""What the decode step asks of a model. Any object with these members can be served."""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from jaxtyping import Array, Bool, Float, Int, Shaped

from dhisparse_jax.geometry import Geometry
from dhisparse_jax.hierarchy.retrieve import Attended
from dhisparse_jax.hierarchy.select import IndexInputs
from dhisparse_jax.pytree import state as pytree

Params = Any
"""The model's weights, any pytree: an argument of every jitted function, never a constant."""

Opened = TypeVar("Opened")
"""An open group (decode) or an open prompt (prefill); a model only hands it on."""


@runtime_checkable
class OpenFn(Protocol[Opened]):
    """Select for the new tokens of a group, from what the group's indexer computed.

    Several layers of a group may select from its records, each for those that follow it: what the
    first one opened, and layers have attended with, is then opened again, without index keys.
    """

    def __call__(self, index: IndexInputs, opened: Opened | None = None) -> Opened:
        """Opens a group, or opens it again."""
        ...


Taps = tuple[Float[Array, "R T width"], ...]
"""What drafters read of some layers of a group.

Where there is one residual stream, that stream after the layer. The mean of several after the layer
in DeepSeek-V4; in V4.1 before its attention."""

AttendFn = Callable[
    [Opened, int, Float[Array, "R E width"] | None, Float[Array, "R T H width"]],
    tuple[Attended, Opened],
]
"""(opened, layer in record, new rows, absorbed queries) -> (what is attended, opened).

Without new rows, where another layer writes them, which this one shares."""

KeptLeaves = tuple[Shaped[Array, "R _ _"], ...]
"""What the layers of a group keep beside records; see `hierarchy.kept`."""


@pytree
class Beside:
    """What a group may need beside the residual stream.

    Attributes:
        tokens: int32 token ids.
        kept: what its layers keep, by `Geometry.kept`.
        writes: requests whose rows are written; what is kept of the others stays as it is.
    """

    tokens: Int[Array, "R T"]
    kept: KeptLeaves
    writes: Bool[Array, " R"]


@dataclasses.dataclass(frozen=True)
class Ran(Generic[Opened]):
    """What a group gives.

    Attributes:
        x: the residual stream after it.
        taps: what there is to read of each tapped layer.
        opened: the group.
        kept: what its layers keep now.
    """

    x: Float[Array, "R T D"]
    taps: Taps
    opened: Opened
    kept: KeptLeaves = ()


@runtime_checkable
class ServedModel(Protocol):
    """A model with native sparse selection, as pure functions of its weights.

    Attributes:
        geometry: what it needs of a hierarchy; one pool per group of layers.
        context: most positions it can use.
        vocabulary: number of token ids.
    """

    @property
    def geometry(self) -> Geometry: ...  # noqa: D102

    @property
    def context(self) -> int: ...  # noqa: D102

    @property
    def vocabulary(self) -> int: ...  # noqa: D102

    def embed(self, params: Params, tokens: Int[Array, "R T"]) -> Float[Array, "R T D"]:
        """Token embeddings."""
        ...

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
        """All layers of group `pool`: `open_group`, then `attend` once per layer.

        Args:
            params: weights.
            pool: which group.
            x: residual stream before it.
            positions: int32 position of every token.
            open_group: see `OpenFn`.
            attend: see `AttendFn`.
            taps: places of layers in the group, ascending.
            beside: what else there is; always given if the geometry says that something is kept.
        """
        ...

    def logits(self, params: Params, x: Float[Array, "R T D"]) -> Float[Array, "R T V"]:
        """Final norm and head, float32."""
        ...


def layers_per_group(geometry: Geometry) -> tuple[int, ...]:
    """How many layers run with each pool, in order: all of them, not only those with rows in it.

    DeepSeek-V4-Flash: 4, then 19 times 2, then 1.
    """
    return geometry.group_layers or geometry.layers_per_pool


def places_of(geometry: Geometry, pool: int, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Places in group `pool` of those of `layers` that lie in it, ascending.

    With groups of 1, 1 and 4 layers, layers 5, 1 and 2 have places 0 and 3 in group 2.
    """
    sizes = layers_per_group(geometry)
    first, count = sum(sizes[:pool]), sizes[pool]
    return tuple(sorted(layer - first for layer in layers if first <= layer < first + count))


def layers_of(geometry: Geometry, pool: int, places: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of the layers at these places of group `pool`: the reverse of `places_of`."""
    first = sum(layers_per_group(geometry)[:pool])
    return tuple(first + place for place in places)
