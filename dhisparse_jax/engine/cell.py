"""What decode steps change on one device, whoever has it in hand."""

import dataclasses
from collections.abc import Callable

from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.speculation.protocol import DraftState
from dhisparse_jax.speculation.schedule import Load
from dhisparse_jax.step import DecodeState, Texts


class Cell:
    """The parts of a `DecodeState` on one device.

    After steps of several devices together they are parts of larger arrays. To take these apart
    and put them together again costs the host some milliseconds, which steps alone do not need:
    so it is done when somebody asks for a part.

    Args:
        cell: the state.

    Attributes:
        fetch: puts the state back that was taken out.
    """

    def __init__(self, cell: DecodeState) -> None:
        self._cell: DecodeState | None = cell
        self.fetch: Callable[[], None] = lambda: None

    def cell(self) -> DecodeState:
        """The state."""
        if self._cell is None:
            self.fetch()
        assert self._cell is not None  # who takes it out says how it comes back
        return self._cell

    def put(self, cell: DecodeState) -> None:
        """Set the state."""
        self._cell = cell

    def take(self) -> DecodeState:
        """The state, which must be put back: a step consumes it."""
        cell, self._cell = self.cell(), None
        return cell

    @property
    def state(self) -> HierarchyState:
        """The hierarchy, between steps."""
        return self.cell().hierarchy

    @state.setter
    def state(self, state: HierarchyState) -> None:
        self.put(dataclasses.replace(self.cell(), hierarchy=state))

    @property
    def draft_state(self) -> DraftState:
        """What the drafter keeps of every request."""
        return self.cell().draft

    @draft_state.setter
    def draft_state(self, state: DraftState) -> None:
        self.put(dataclasses.replace(self.cell(), draft=state))

    @property
    def load(self) -> Load:
        """What the last steps were like, for the rule."""
        return self.cell().load

    @load.setter
    def load(self, load: Load) -> None:
        self.put(dataclasses.replace(self.cell(), load=load))

    @property
    def texts(self) -> Texts:
        """What every row is writing."""
        return self.cell().texts

    @texts.setter
    def texts(self, texts: Texts) -> None:
        self.put(dataclasses.replace(self.cell(), texts=texts))
