"""Host pages of the requests, and what one takes over from a text that lies in pages.

Host pages hold all that there is of a history, records and index keys. So a request that leaves its
row may keep its pages and come back to any row, and the text of one that has ended can be shared
until its pages are needed, wherever it was.
"""

import dataclasses
import itertools
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
        source: int32 host pages with the shared positions.
        shared: int32 first positions, which are there already.
        kept: int32 how many of them lie in pages that are the row's too; the others are copied.
    """

    pages: Int[Array, " N"]
    source: Int[Array, " N"]
    shared: Int[Array, ""]
    kept: Int[Array, ""]


@dataclasses.dataclass(eq=False)
class Holding:
    """Host pages of one request, wherever it is.

    Attributes:
        pages: in the order of its positions.
        copied: the page that it copies from until its prompt is prefilled.
        text: number of its text, which others can share; None before its prompt is prefilled.
        private: whether nobody may share its text.
    """

    pages: Pages
    copied: Pages
    text: int | None = None
    private: bool = False


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
        self._texts: dict[int, Pages] = {}  # by number
        self._rows: dict[int, Holding] = {}
        self._finished: dict[int, None] = {}  # texts without a request, the oldest first
        self._numbers = itertools.count()
        # Who does not fit as things are, by the holdings that it would do without.
        self._refused: dict[tuple[int, ...], tuple[Sequence[int], int]] = {}

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

    def fits(self, prompt: Sequence[int], positions: int, without: Sequence[Holding] = ()) -> bool:
        """Whether a request that commits so many positions can enter, once others hold nothing.

        Asking again before anything has changed costs nothing.
        """
        others = tuple(map(id, without))
        refused = self._refused.get(others)
        if refused and refused[0] is prompt and refused[1] <= positions:
            return False
        users = self.pages.users.copy()
        for holding in without:
            users[holding.pages] -= 1
            users[holding.copied] -= 1
        fits = self._plan(prompt, positions, users) is not None
        if not fits:
            self._refused[others] = (prompt, positions)
        return fits

    def of(self, row: int) -> Holding:
        """What the request of a row holds."""
        return self._rows[row]

    def enter(
        self, row: int, prompt: Sequence[int], positions: int, *, private: bool = False
    ) -> Entry:
        """Give a row the pages for a request.

        Args:
            row: without a request.
            prompt: whose first positions may be shared; empty if nothing is to be.
            positions: that the request commits at most, its prompt included.
            private: whether nobody may share what it has.

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
        while self.pages.free < plan.fresh:
            self._forget(next(iter(self._finished)))
        mine = np.concatenate([plan.source[: plan.whole], self.pages.take(plan.fresh)])
        self._rows[row] = Holding(pages=mine, copied=plan.source[plan.whole :], private=private)
        return Entry(
            pages=self.table(self._rows[row]),
            source=self._padded(plan.source),
            shared=_given(plan.prefix.length),
            kept=_given(plan.whole * self._cfg.host_page),
        )

    def nothing(self) -> Entry:
        """What would be entered with by nobody."""
        none = self._padded(_NOTHING)
        return Entry(pages=none, source=none, shared=_given(0), kept=_given(0))

    def has(self, row: int, text: Sequence[int]) -> None:
        """These tokens are in the row's pages: others can share them now, but not private ones."""
        holding = self._rows[row]
        self.pages.drop(holding.copied)
        holding.copied = _NOTHING
        self._refused.clear()
        if holding.private or not self._shares:
            return
        if holding.text is None:
            holding.text = next(self._numbers)
        self._texts[holding.text] = holding.pages[: self.pages_for(len(text))]
        self._prefixes.add(holding.text, text)

    def leave(self, row: int) -> None:
        """The request of a row has ended."""
        self.release(self.take_out(row))

    def take_out(self, row: int) -> Holding:
        """The request of a row leaves it, and keeps its pages."""
        return self._rows.pop(row)

    def put_back(self, row: int, holding: Holding) -> Any:  # noqa: ANN401  # as `_given`
        """The reverse of `take_out`, into any row; returns its table of pages."""
        self._rows[row] = holding
        return self.table(holding)

    def table(self, holding: Holding) -> Any:  # noqa: ANN401  # as `_given`
        """The pages of a holding as a row of the table that the device has."""
        return self._padded(holding.pages)

    def release(self, holding: Holding) -> None:
        """A request needs its pages no more. Its text stays in them while there is room."""
        if holding.text is not None:
            self.pages.keep(self._texts[holding.text])
            self._finished[holding.text] = None
        self.pages.drop(holding.copied)
        self.pages.drop(holding.pages)
        self._refused.clear()

    def forget(self) -> None:
        """Forget the texts of all requests that have ended."""
        for text in tuple(self._finished):
            self._forget(text)

    def _forget(self, text: int) -> None:
        del self._finished[text]
        self._prefixes.remove(text)
        self.pages.forget(self._texts.pop(text))

    def _plan(
        self, prompt: Sequence[int], positions: int, users: Int[np.ndarray, " pages"]
    ) -> _Plan | None:
        """The most that can be shared; None if the request does not fit whatever is shared."""
        prefix = self._prefixes.longest(prompt[:-1])  # the last token gives the first new one
        whole = prefix.length // self._cfg.host_page
        # To copy from a page keeps one page more from being used.
        for length in (prefix.length, whole * self._cfg.host_page):
            source = self._texts.get(prefix.text, _NOTHING)[: self.pages_for(length)]
            prefix = Prefix(prefix.text, length)
            plan = _Plan(prefix, source, whole, self.pages_for(positions) - whole)
            if plan.fresh <= (users == 0).sum() - (users[source] == 0).sum():
                return plan
        return None

    def _padded(self, pages: Pages) -> Any:  # noqa: ANN401  # as `_given`
        rest = self._cfg.row_pages - len(pages)
        return _given(np.pad(pages, (0, rest), constant_values=NO_SLOT))


def _given(value: int | Pages) -> Any:  # noqa: ANN401  # what jit takes for an array
    """An int32 array that is not on the device yet, so that reading it waits for nothing."""
    return np.asarray(value, np.int32)
