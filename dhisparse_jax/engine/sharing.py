"""Host pages of the rows, and what a request takes over from a text that a row has.

A row has the text of its request, or of the last one that was in it until another one enters or
the pages are needed: index keys lie in rows, so what a row has forgotten cannot be shared.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.engine.host_pages import HostPages, Pages
from dhisparse_jax.engine.prefixes import Prefix, Prefixes
from dhisparse_jax.errors import UserError
from dhisparse_jax.pytree import state as pytree
from pallas_kernels.common.ids import NO_SLOT


@pytree
class Entry:
    """What a request enters a row with. N host pages per row, NO_SLOT after the last.

    Attributes:
        pages: int32 host pages of the row.
        source: int32 host pages with the records of the shared positions.
        donor: int32 row with their index keys.
        shared: int32 first positions, which need no prefill.
        kept: int32 how many of them lie in pages that are the row's too; the others are copied.
    """

    pages: Int[Array, " N"]
    source: Int[Array, " N"]
    donor: Int[Array, ""]
    shared: Int[Array, ""]
    kept: Int[Array, ""]


class _Plan(NamedTuple):
    """A way to let a request in.

    Attributes:
        prefix: what it takes over.
        source: pages with that.
        whole: how many of them it holds from then on; it copies from the last one if that is more.
        fresh: how many pages it needs beside them.
    """

    prefix: Prefix
    source: Pages
    whole: int
    fresh: int


_NOTHING = np.zeros(0, np.int32)


class Sharing:
    """Who has which host pages, and what can be shared.

    Args:
        cfg: sizes of the hierarchy.

    Attributes:
        pages: the holders of every page.
    """

    def __init__(self, cfg: HierarchyConfig) -> None:
        self._cfg = cfg
        self.pages = HostPages(cfg.host_page_count)
        self._prefixes = Prefixes(cfg.host_page)
        self._shares = not cfg.geometry.kept  # else records are not all that a prefill needs
        self._pages_of: dict[int, Pages] = {}  # of rows with a request or with a finished text
        self._copied: dict[int, Pages] = {}  # page that a row in prefill copies from
        self._finished: dict[int, None] = {}  # rows that have only a text, the oldest first
        self._refused: tuple[Sequence[int], int] | None = None  # does not fit as things are

    def pages_for(self, positions: int) -> int:
        """How many pages so many positions take."""
        return -(-positions // self._cfg.host_page)

    def check(self, name: str, positions: int) -> None:
        """Whether a request that commits so many positions can ever enter.

        Raises:
            UserError: there are fewer pages than it needs.
        """
        needed, size, total = self.pages_for(positions), self._cfg.host_page, len(self.pages.users)
        if needed > total:
            raise UserError(
                f"{name}: {positions} positions need {needed} pages of {size} in host memory, "
                f"which has {total}; ask for at most {total * size} positions, prompt and new "
                "tokens together, or raise host_pages"
            )

    def fits(self, prompt: Sequence[int], positions: int, without: Sequence[int] = ()) -> bool:
        """Whether a request that commits so many positions can enter, once rows have been left.

        Asking again before anything has changed costs nothing.
        """
        refused = self._refused
        if not without and refused and refused[0] is prompt and refused[1] <= positions:
            return False
        users = self.pages.users.copy()
        for row in without:
            users[self._pages_of[row]] -= 1
        fits = self._plan(prompt, positions, users) is not None
        if not without:
            self._refused = None if fits else (prompt, positions)
        return fits

    def best_row(self, free: Sequence[int]) -> int:
        """Of rows without a request: one without a text, or the one with the oldest."""
        order = {row: age for age, row in enumerate(self._finished, start=1)}
        return min(free, key=lambda row: order.get(row, 0))

    def enter(self, row: int, prompt: Sequence[int], positions: int) -> Entry:
        """Give a row the pages for a request.

        Args:
            row: without a request.
            prompt: whose first positions may be shared; empty if nothing is to be.
            positions: that the request commits at most, its prompt included.

        Raises:
            UserError: it does not fit.
        """
        plan = self._plan(prompt, positions, self.pages.users)
        if plan is None:
            size = self._cfg.host_page
            raise UserError(
                f"{positions} positions need {self.pages_for(positions)} pages of {size} in host "
                f"memory, {self.pages.unused} of {self._cfg.host_page_count} can be had now; end "
                "other requests, or raise host_pages"
            )
        self.pages.hold(plan.source)  # so that they outlive their text
        if row in self._finished:
            self._forget(row)
        while self.pages.free < plan.fresh:
            self._forget(next(iter(self._finished)))
        mine = np.concatenate([plan.source[: plan.whole], self.pages.take(plan.fresh)])
        self._pages_of[row], self._copied[row] = mine, plan.source[plan.whole :]
        return Entry(
            pages=self._padded(mine),
            source=self._padded(plan.source),
            donor=_given(plan.prefix.row),
            shared=_given(plan.prefix.length),
            kept=_given(plan.whole * self._cfg.host_page),
        )

    def has(self, row: int, text: Sequence[int]) -> None:
        """The records of these tokens are in the row's pages: others can share them now."""
        self.pages.drop(self._copied.pop(row, _NOTHING))
        if self._shares:
            self._prefixes.add(row, text)
        self._refused = None

    def leave(self, row: int) -> None:
        """The request of a row is gone. The text that the row has stays while there is room."""
        self.pages.drop(self._copied.pop(row, _NOTHING))
        pages = self._pages_of.pop(row)
        if row in self._prefixes:
            text = pages[: self.pages_for(self._prefixes.size(row))]
            self.pages.keep(text)
            self._pages_of[row], self._finished[row] = text, None
        self.pages.drop(pages)
        self._refused = None

    def forget(self) -> None:
        """Forget the texts of all rows without a request."""
        for row in tuple(self._finished):
            self._forget(row)

    def _forget(self, row: int) -> None:
        del self._finished[row]
        self._prefixes.remove(row)
        self.pages.forget(self._pages_of.pop(row))

    def _plan(
        self, prompt: Sequence[int], positions: int, users: Int[np.ndarray, " pages"]
    ) -> _Plan | None:
        """The most that can be shared; None if the request does not fit whatever is shared."""
        prefix = self._prefixes.longest(prompt[:-1])  # the last token gives the first new one
        whole = prefix.length // self._cfg.host_page
        # To copy from a page keeps one page more from being used.
        for length in (prefix.length, whole * self._cfg.host_page):
            source = self._pages_of.get(prefix.row, _NOTHING)[: self.pages_for(length)]
            plan = _Plan(
                Prefix(prefix.row, length), source, whole, self.pages_for(positions) - whole
            )
            if plan.fresh <= (users == 0).sum() - (users[source] == 0).sum():
                return plan
        return None

    def _padded(self, pages: Pages) -> Any:  # noqa: ANN401  # as `_given`
        rest = self._cfg.row_pages - len(pages)
        return _given(np.pad(pages, (0, rest), constant_values=NO_SLOT))


def _given(value: int | Pages) -> Any:  # noqa: ANN401  # what jit takes for an array
    """An int32 array that is not on the device yet, so that reading it waits for nothing."""
    return np.asarray(value, np.int32)
