"""Which row has a text that begins as a new one does.

Texts are cut into blocks as their records are into host pages, and a block is named by a hash of
its tokens and of the name of the block before it: equal names mean equal texts up to there. Names
only nominate; tokens are compared before anything is shared.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

Tokens = Int[np.ndarray, " n"]


class Prefix(NamedTuple):
    """The longest beginning that a text has in common with one of a row.

    Attributes:
        row: that row.
        length: tokens in common; 0 if there is nothing to share.
    """

    row: int = 0
    length: int = 0


class Prefixes:
    """Texts by row.

    Args:
        block: tokens of a block.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self._texts: dict[int, Tokens] = {}
        self._rows: dict[int, dict[int, None]] = {}  # by name of a block; in order of arrival

    def __contains__(self, row: int) -> bool:
        """Whether a row has a text."""
        return row in self._texts

    def size(self, row: int) -> int:
        """Tokens of a row's text."""
        return len(self._texts[row])

    def add(self, row: int, tokens: Sequence[int]) -> None:
        """From now on the row has this text, and no other."""
        self.remove(row)
        text = self._texts[row] = np.asarray(tokens, np.int32)
        for name in self._names(text):
            self._rows.setdefault(name, {})[row] = None

    def remove(self, row: int) -> None:
        """The row has no text any more."""
        text = self._texts.pop(row, None)
        for name in () if text is None else self._names(text):
            rows = self._rows.get(name, {})
            rows.pop(row, None)
            if not rows:
                self._rows.pop(name, None)

    def longest(self, tokens: Sequence[int]) -> Prefix:
        """The row whose text has most in common with these tokens, at least a whole block."""
        text = np.asarray(tokens, np.int32)
        rows: dict[int, None] = {}
        whole = 0
        for name in self._names(text):
            if name not in self._rows:
                break
            rows, whole = self._rows[name], whole + 1
        # All of these rows have the same whole blocks: the next one decides.
        start, end = whole * self._block, (whole + 1) * self._block
        more = lambda row: _common(self._texts[row][start:end], text[start:end])
        row = max(rows, key=more, default=None)
        if row is None:
            return Prefix()
        length = _common(self._texts[row], text)
        return Prefix(row, length) if length >= self._block else Prefix()

    def _names(self, text: Tokens) -> list[int]:
        """Names of the whole blocks of a text."""
        names: list[int] = []
        name = 0
        for end in range(self._block, len(text) + 1, self._block):
            name = hash((name, text[end - self._block : end].tobytes()))
            names.append(name)
        return names


def _common(one: Int[np.ndarray, " n"], other: Int[np.ndarray, " m"]) -> int:
    """How many tokens two texts begin with in common."""
    count = min(len(one), len(other))
    differs = one[:count] != other[:count]
    return int(differs.argmax()) if differs.any() else count
