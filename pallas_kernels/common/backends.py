"""Which implementation of an operation runs. Explicit, reported, never a silent fallback."""

from typing import Literal

import jax

Backend = Literal["reference", "triton", "mosaic"]
"""reference: exact jnp, any device that can address the operands. triton: Pallas-Triton, any CUDA
GPU. mosaic: Pallas Mosaic GPU, Hopper."""

HOST_OPERATIONS = ("retrieve", "backup")
"""Operations that address host memory; the others work on device arrays only."""

GPU_KERNELS: dict[str, Backend] = {
    "retrieve": "triton",
    "backup": "triton",
    "index_scores": "mosaic",
    "plan": "triton",
    "top_k": "triton",
    "sparse_attention": "mosaic",
    "retrieve_attend": "mosaic",
    "fp8_products": "triton",
}
"""The GPU kernel of each operation; there is one. Only `index_scores` has another one, for float32,
in which the matrix units do not multiply."""

HOPPER = "9.0"
"""Compute capability that the Mosaic kernels are written for."""


def default_backend(operation: str, platform: str | None = None) -> Backend:
    """The implementation of `operation` that runs on `platform` (default: where JAX runs).

    Raises:
        NotImplementedError: if the operation addresses host memory and the platform has no kernel
            for that, since plain jnp would copy whole pools there.
    """
    platform = platform or jax.default_backend()
    if operation in GPU_KERNELS and platform in ("gpu", "cuda"):
        return GPU_KERNELS[operation]
    if operation not in HOST_OPERATIONS or platform == "cpu":
        return "reference"
    raise NotImplementedError(f"{operation} has no kernel for {platform}; run on cpu or gpu")


def resolve(
    operation: str,
    backend: Backend | None,
    *,
    refusal: str | None,
    kernel: Backend | None = None,
) -> Backend:
    """The implementation of a call: the named one, or the default one if it takes the operands.

    This is the only place where a default changes with the operands. Who must not run anything but
    the default, such as a benchmark, names it: `resolve(op, default_backend(op), ...)` raises.

    Args:
        operation: name of the operation.
        backend: the implementation that the caller named, if any.
        refusal: why the GPU kernel cannot take these operands, from its `supports`; None if it can.
        kernel: the GPU kernel for operands like these, if it is not that of `GPU_KERNELS`.

    Raises:
        NotImplementedError: if the named implementation cannot take the operands; with the reason.
    """
    chosen = backend or default_backend(operation)
    if chosen == "reference":
        return chosen
    kernel = kernel or GPU_KERNELS.get(operation)
    chosen = backend or kernel or chosen
    if chosen != kernel:
        raise NotImplementedError(f"{operation} has no {chosen} kernel for operands like these")
    refusal = refusal or _device_refusal(chosen)
    if refusal is None:
        return chosen
    if backend is None and operation not in HOST_OPERATIONS:
        return "reference"
    raise NotImplementedError(f"the {chosen} kernel of {operation} cannot run this: {refusal}")


def _device_refusal(backend: Backend) -> str | None:
    """Why the GPU that JAX runs on cannot run a kernel; None if it can, or without a GPU."""
    if backend != "mosaic" or jax.default_backend() != "gpu":
        return None
    capability = jax.devices()[0].compute_capability
    if capability == HOPPER:
        return None
    return f"it is for compute capability {HOPPER}, and this GPU has {capability}"
