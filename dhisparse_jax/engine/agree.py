"""Whether all processes were told the same: they decide by it, each for itself."""

import hashlib
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from dhisparse_jax.errors import UserError

_SHOWN, _DIGEST = 96, 32
"""Bytes that are exchanged of every value: its beginning, and a hash of the whole."""


def agree(items: Mapping[str, object]) -> None:
    """Compare what processes were told; every one of them must call it. Alone, nothing happens.

    Args:
        items: values by name, with the same names in all processes. A value counts by its `str`.

    Raises:
        UserError: in every process, if a value differs; names the first, and two processes.
    """
    if jax.process_count() == 1:
        return
    if jax.device_count() != jax.process_count() * jax.local_device_count():
        raise UserError(
            f"process {jax.process_index()} has {jax.local_device_count()} of "
            f"{jax.device_count()} devices; all {jax.process_count()} processes need as many"
        )
    mine = np.stack([_encoded(str(value)) for value in items.values()])
    every = np.asarray(multihost_utils.process_allgather(mine))  # [processes, items, bytes]
    for place, name in enumerate(items):
        for process, value in enumerate(every[:, place]):
            if (value != every[0, place]).any():
                raise UserError(
                    f"processes disagree on {name}: process 0 has {_shown(every[0, place])}, "
                    f"process {process} has {_shown(value)}; give all of them the same"
                )


def _encoded(text: str) -> np.ndarray:
    data = text.encode()
    begin = data[:_SHOWN].ljust(_SHOWN, b"\0")
    return np.frombuffer(begin + hashlib.sha256(data).digest()[:_DIGEST], np.uint8)


def _shown(value: np.ndarray) -> str:
    return value[:_SHOWN].tobytes().rstrip(b"\0").decode(errors="replace")
