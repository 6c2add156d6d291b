"""What the decode step asks of a model. Any object with these members can be served."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

from jaxtyping import Array, Float, Int

from dhisparse_jax.config import Geometry
from dhisparse_jax.hierarchy.select import IndexInputs

Params = Any
"""The model's weights, any pytree: an argument of every jitted function, never a constant."""

Opened = TypeVar("Opened")
"""An open group (decode) or an open prompt (prefill); a model only hands it on."""

OpenFn = Callable[[IndexInputs], Opened]
"""Select for the new tokens of a group, from what the group's indexer computed."""

AttendFn = Callable[
    [Opened, int, Float[Array, "R T width"], Float[Array, "R T H width"]],
    tuple[Float[Array, "R T H value"], Opened],
]
"""(opened, layer in group, new rows, absorbed queries) -> (attended values, opened)."""


@runtime_checkable
class ServedModel(Protocol):
    """A model with native sparse selection, as pure functions of its weights.

    Attributes:
        geometry: what it needs of a hierarchy; one pool per selection group.
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
    ) -> tuple[Float[Array, "R T D"], Opened]:
        """All layers of selection group `pool`: `open_group` once, then `attend` once per layer."""
        ...

    def logits(self, params: Params, x: Float[Array, "R T D"]) -> Float[Array, "R T V"]:
        """Final norm and head, float32."""
        ...
