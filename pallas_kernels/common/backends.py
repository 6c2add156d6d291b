"""Which implementation of an operation runs. Explicit, reported, never a silent fallback."""

from typing import Literal

import jax

Backend = Literal["reference", "triton"]
"""reference: exact jnp, any device that can address the operands. triton: Pallas-Triton, GPU."""

HOST_OPERATIONS = ("retrieve", "backup")
"""Operations that address host memory; the others work on device arrays only."""


def default_backend(operation: str, platform: str | None = None) -> Backend:
    """The implementation of `operation` that runs on `platform` (default: where JAX runs).

    Raises:
        NotImplementedError: if the operation addresses host memory and the platform has no kernel
            for that, since plain jnp would copy whole pools there.
    """
    platform = platform or jax.default_backend()
    if operation not in HOST_OPERATIONS or platform == "cpu":
        return "reference"
    if platform in ("gpu", "cuda"):
        return "triton"
    raise NotImplementedError(f"{operation} has no kernel for {platform}; run on cpu or gpu")
