"""Which implementation of an operation runs. Explicit, reported, never a silent fallback."""

from typing import Literal

import jax

Backend = Literal["reference", "triton"]
"""reference: exact jnp, any device that can address the operands. triton: Pallas-Triton, GPU."""

HOST_OPERATIONS = ("retrieve", "backup")
"""Operations that address host memory; the others work on device arrays only."""

TRITON_OPERATIONS = (*HOST_OPERATIONS, "index_scores", "plan", "sparse_attention", "top_k")
"""Operations with a Triton kernel."""


def default_backend(operation: str, platform: str | None = None) -> Backend:
    """The implementation of `operation` that runs on `platform` (default: where JAX runs).

    Raises:
        NotImplementedError: if the operation addresses host memory and the platform has no kernel
            for that, since plain jnp would copy whole pools there.
    """
    platform = platform or jax.default_backend()
    if operation in TRITON_OPERATIONS and platform in ("gpu", "cuda"):
        return "triton"
    if operation not in HOST_OPERATIONS or platform == "cpu":
        return "reference"
    raise NotImplementedError(f"{operation} has no kernel for {platform}; run on cpu or gpu")


def resolve(operation: str, backend: Backend | None, *, refusal: str | None) -> Backend:
    """The implementation of a call: the named one, or the default one if it takes the operands.

    This is the only place where a default changes with the operands. Who must not run anything but
    the default, such as a benchmark, names it: `resolve(op, default_backend(op), ...)` raises.

    Args:
        operation: name of the operation.
        backend: the implementation that the caller named, if any.
        refusal: why the Triton kernel cannot take these operands, from its `supports`; None if
            it can.

    Raises:
        NotImplementedError: if the named implementation cannot take the operands; with the reason.
    """
    chosen = backend or default_backend(operation)
    if chosen != "triton" or refusal is None:
        return chosen
    if backend is None and operation not in HOST_OPERATIONS:
        return "reference"
    raise NotImplementedError(f"the Triton kernel of {operation} cannot run this: {refusal}")
