"""A machine on a device of another process: who has what there, and no array."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Int
from typing_extensions import override

from dhisparse_jax.engine.compiled import Hidden
from dhisparse_jax.engine.ledger import Ledger
from dhisparse_jax.engine.machine import Machine
from dhisparse_jax.engine.request import Request
from dhisparse_jax.engine.seat import Chunk
from dhisparse_jax.engine.sharing import Entry, Holding, Sharing
from dhisparse_jax.prefill import Prompt


class Elsewhere(Machine):
    """Does what a machine does but for the arrays, which the process that owns the device has.

    Where there would be an array, there is None.

    All processes decide alike, so that each knows what every device does, and launches the programs
    that run on all of them.

    Args:
        like: a machine of this process.
    """

    def __init__(self, like: Machine) -> None:
        self.cfg, self.drafter, self.compiled = like.cfg, like.drafter, like.compiled
        self.stepwise, self.together = like.stepwise, like.together
        self.sharing, self.ledger = Sharing(like.cfg), Ledger.of(like.cfg)

    @override
    def embed(self, tokens: Sequence[int], origin: int) -> Any:  # no array
        """See `Machine`."""
        return None

    @override
    def begin_prompt(self, pool: int, entry: Entry) -> Any:  # no array
        """See `Machine`."""
        return None

    @override
    def run_alone(self, chunk: Chunk) -> Any:  # no array
        """See `Machine`."""
        return None, None

    @override
    def draft_prompt(self, row: int, hidden: Hidden | None, origin: int, length: int) -> None:
        """See `Machine`."""

    @override
    def join(self, row: int, length: int, pages: Int[Array, " N"] | Int[np.ndarray, " N"]) -> None:
        """See `Machine`."""

    @override
    def admit(self, row: int, pool: int, prompt: Prompt | None, entry: Entry) -> None:
        """See `Machine`."""

    @override
    def vacate(self, row: int) -> Holding:
        """See `Machine`."""
        return self.sharing.take_out(row)

    @override
    def quiet(self, row: int) -> None:
        """See `Machine`."""

    @override
    def write(
        self, row: int, request: Request, draw: int, anchor: Int[Array, " one"] | None
    ) -> None:
        """See `Machine`."""

    @override
    def first_token(self, hidden: Hidden | None, request: Request, draw: int) -> Any:
        """See `Machine`."""
        return None
