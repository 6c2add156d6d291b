"""Wording shared by the messages of the loaders."""

from collections.abc import Sequence


def few(items: Sequence[str], limit: int = 3) -> str:
    """The first items, and how many there are beside them."""
    more = f", and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
