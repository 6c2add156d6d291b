"""Which known text begins as a new one does.

Texts are cut into blocks as their records are into host pages, and a block is named by a hash of
its tokens and of the name of the block before it: equal names mean equal texts up to there. Names
only nominate; tokens are compared before anything is shared.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

Tokens = Int[np.ndarray, " n"]
"""A text, as its tokens."""


class Prefix(NamedTuple):
    """The longest beginning that a text has in common with a known one.

    Attributes:
        text: number of that text.
        length: tokens in common; 0 if there is nothing to share.
    """

    text: int = 0
    length: int = 0


NOMINATED = 16
"""Texts that are compared with a new one token by token, the newest of those with equal blocks."""


class Prefixes:
    """Texts by number.

    Args:
        block: tokens of a block.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self._texts: dict[int, Tokens] = {}
        self._named: dict[int, dict[int, None]] = {}  # texts by name of a block, the newest last

    def size(self, number: int) -> int:
        """Tokens of a text."""
        return len(self._texts[number])

    def add(self, number: int, tokens: Sequence[int]) -> None:
        """From now on this is the text of that number, and no other."""
        self.remove(number)
        text = self._texts[number] = np.asarray(tokens, np.int32)
        for name in self._names(text):
            self._named.setdefault(name, {})[number] = None

    def remove(self, number: int) -> None:
        """Forget a text, if it is known."""
        text = self._texts.pop(number, None)
        for name in () if text is None else self._names(text):
            named = self._named.get(name, {})
            named.pop(number, None)
            if not named:
                self._named.pop(name, None)

    def longest(self, tokens: Sequence[int]) -> Prefix:
        """The text that has most in common with these tokens, at least a whole block."""
        text = np.asarray(tokens, np.int32)
        numbers: dict[int, None] = {}
        whole = 0
        for name in self._names(text):
            if name not in self._named:
                break
            numbers, whole = self._named[name], whole + 1
        # All of these have the same whole blocks: the next one decides.
        start, end = whole * self._block, (whole + 1) * self._block
        more = lambda number: _common(self._texts[number][start:end], text[start:end])
        newest = itertools.islice(reversed(numbers), NOMINATED)
        number = max(newest, key=more, default=None)
        if number is None:
            return Prefix()
        length = _common(self._texts[number], text)
        return Prefix(number, length) if length >= self._block else Prefix()

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
