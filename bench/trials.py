"""What a sweep over variants of a kernel is made of: a check and a time for each variant."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bench.roofline import Traffic
from bench.work import WrongResultError

INTERPRET = jax.default_backend() == "cpu"
"""Where there is no GPU the script can be tried, with --small; its times mean nothing there."""


class Trial(NamedTuple):
    """One time to find.

    Attributes:
        name: operation, case and variant.
        traffic: what one call has to move.
        check: raises WrongResultError if the variant is wrong.
        run: median microseconds of a call.
    """

    name: tuple[str, str, str]
    traffic: Traffic
    check: Callable[[], None]
    run: Callable[[], float]


def equal(found: Any, exact: Any) -> None:  # noqa: ANN401
    """Compare every entry, on the device.

    Raises:
        WrongResultError: with the first leaf that differs.
    """
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(exact), strict=True)
    for (path, leaf), wanted in pairs:
        if not bool(jnp.array_equal(leaf, wanted)):
            where = jnp.argwhere(leaf != wanted, size=1)[0].tolist()
            count = int(jnp.sum(leaf != wanted))
            name = jax.tree_util.keystr(path)
            raise WrongResultError(f"{name} differs in {count} entries, first at {where}")
