"""Which implementation of an operation runs. Explicit, reported, never a silent fallback."""

from typing import Literal

import jax

Backend = Literal["reference", "triton"]
"""reference: exact jnp, any device that can address the operands. triton: Pallas-Triton, GPU."""

HOST_OPERATIONS = ("retrieve", "backup")
"""Operations that address host memory; the others work on device arrays only."""

GPU_OPERATIONS = (*HOST_OPERATIONS, "plan", "top_k")
"""Operations that have a kernel for GPUs."""


def default_backend(
    operation: str, platform: str | None = None, *, refusal: str | None = None
) -> Backend:
    """The implementation of `operation` that runs on `platform` (default: where JAX runs).

    Args:
        operation: name of its folder.
        platform: as JAX names it.
        refusal: why the kernel does not support the operands, from its `supports`. Then the
            reference runs; a benchmark names its backend and gets the refusal as an error.

    Raises:
        NotImplementedError: if the operation addresses host memory and the platform has no kernel
            for that, since plain jnp would copy whole pools there.
    """
    platform = platform or jax.default_backend()
    on_gpu = platform in ("gpu", "cuda")
    if operation in GPU_OPERATIONS and on_gpu and refusal is None:
        return "triton"
    if operation in HOST_OPERATIONS and platform != "cpu":
        why = refusal if on_gpu else f"{operation} has no kernel for {platform}; run on cpu or gpu"
        raise NotImplementedError(why)
    return "reference"
