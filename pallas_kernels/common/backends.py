"""Which implementation of an operation runs. Explicit, reported, never a silent fallback."""

from collections.abc import Mapping
from typing import Literal

import jax

Backend = Literal["reference", "triton", "mosaic"]
"""reference: exact jnp, any device that can address the operands. triton: Pallas-Triton, GPU.
mosaic: Mosaic GPU, Hopper GPUs."""

HOST_OPERATIONS = ("retrieve", "backup")
"""Operations that address host memory; the others work on device arrays only."""

KERNELS: dict[str, Backend] = {
    "retrieve": "triton",
    "backup": "triton",
    "plan": "triton",
    "index_scores": "mosaic",
    "top_k": "triton",
    "sparse_attention": "triton",
}
"""Operations with a GPU kernel, and the one that runs where it takes the operands."""


def default_backend(operation: str, platform: str | None = None) -> Backend:
    """The implementation of `operation` that runs on `platform` (default: where JAX runs).

    Raises:
        NotImplementedError: if the operation addresses host memory and the platform has no kernel
            for that, since plain jnp would copy whole pools there.
    """
    platform = platform or jax.default_backend()
    if operation in KERNELS and platform in ("gpu", "cuda"):
        return KERNELS[operation]
    if operation not in HOST_OPERATIONS or platform == "cpu":
        return "reference"
    raise NotImplementedError(f"{operation} has no kernel for {platform}; run on cpu or gpu")


def resolve(
    operation: str, backend: Backend | None, *, refusals: Mapping[Backend, str | None]
) -> Backend:
    """The implementation of a call: the named one, or the first kernel that takes the operands.

    This is the only place where a default changes with the operands. Who must not run anything but
    the default, such as a benchmark, names it: `resolve(op, default_backend(op), ...)` raises.

    Args:
        operation: name of the operation.
        backend: the implementation that the caller named, if any.
        refusals: why a kernel cannot take these operands, from its `supports`; None if it can. The
            kernels of the operation in the order of choice, the one of `default_backend` first.

    Raises:
        NotImplementedError: if the named implementation cannot take the operands; with the reason.
    """
    chosen = backend or default_backend(operation)
    if chosen == "reference":
        return chosen
    if backend is None:
        able = [name for name, refusal in refusals.items() if refusal is None]
        if able or operation not in HOST_OPERATIONS:
            return able[0] if able else "reference"
    refusal = refusals.get(chosen, "there is none")
    if refusal is None:
        return chosen
    raise NotImplementedError(f"the {chosen} kernel of {operation} cannot run this: {refusal}")
