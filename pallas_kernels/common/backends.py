"""Which implementation of an operation runs. Explicit, reported, never a silent fallback."""

import contextlib
from collections.abc import Generator
from contextvars import ContextVar
from typing import Literal, NamedTuple

import jax

Backend = Literal["reference", "triton", "mosaic", "tpu"]
"""reference: exact jnp, any device that can address the operands. triton: Pallas-Triton, any CUDA
GPU. mosaic: Pallas Mosaic GPU, Hopper. tpu: Pallas Mosaic TPU; interpreted where there is none."""

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
    "packed_products": "triton",
    "sinkhorn": "triton",
    "round_rows": "triton",
    "draft_attention": "triton",
}
"""The GPU kernel of each operation; there is one. Only `index_scores` has another one, for float32,
in which the matrix units do not multiply."""

TPU_KERNELS: dict[str, Backend] = {
    "retrieve": "tpu",
    "backup": "tpu",
    "index_scores": "tpu",
    "top_k": "tpu",
    "sparse_attention": "tpu",
}
"""The TPU kernel of each operation that has one."""

TPU_WITHOUT_KERNEL = {
    "plan": "XLA's gathers and sorts of small tables serve on a TPU",
    "retrieve_attend": "one operation after the other on a TPU",
    "packed_products": "plain XLA on a TPU",
    "sinkhorn": "plain XLA on a TPU",
    "round_rows": "plain XLA on a TPU",
    "draft_attention": "plain XLA on a TPU",
}
"""Operations that have no TPU kernel on purpose, and why."""

HOPPER = "9.0"
"""Compute capability that the Mosaic kernels are written for."""


class Decision(NamedTuple):
    """Which implementation a call of an operation got, and why."""

    operation: str
    backend: Backend
    why: str


class Target(NamedTuple):
    """What programs are made for.

    Attributes:
        platform: a JAX platform.
        compiled: whether they are compiled for a TPU that is not there; see `interpret`.
    """

    platform: str
    compiled: bool = False


_targeted = jax.make_user_context(None)
"""Of JAX's own kind, so that what is traced for one target is not taken for another one."""

_heard: ContextVar[list[Decision] | None] = ContextVar("decisions", default=None)


@contextlib.contextmanager
def decisions() -> Generator[list[Decision], None, None]:
    """What is decided in the body, in order. A jitted program decides while it is traced."""
    found: list[Decision] = []
    token = _heard.set(found)
    try:
        yield found
    finally:
        _heard.reset(token)


@contextlib.contextmanager
def targeting(platform: str, *, compiled: bool = False) -> Generator[None, None, None]:
    """Programs that are traced in the body are made for `platform`, wherever JAX runs.

    Off a TPU, those for "tpu" run in interpret mode, unless `compiled` says that they are only
    compiled (`interpret.ahead_of_time`).
    """
    with _targeted(Target(platform, compiled)):
        yield


def target() -> Target:
    """What programs are made for: what `targeting` says, else where JAX runs."""
    return _targeted.value or Target(jax.default_backend())


def default_backend(operation: str, platform: str | None = None) -> Backend:
    """The implementation of `operation` that runs on `platform` (default: `target`).

    Raises:
        NotImplementedError: if the operation addresses host memory and the platform has no kernel
            for that, since plain jnp would copy whole pools there.
    """
    platform = platform or target().platform
    if platform == "tpu" and operation in TPU_KERNELS:
        return TPU_KERNELS[operation]
    if operation in GPU_KERNELS and platform in ("gpu", "cuda"):
        return GPU_KERNELS[operation]
    if operation not in HOST_OPERATIONS or platform == "cpu":
        return "reference"
    raise NotImplementedError(f"{operation} has no kernel for {platform}; run on cpu, gpu or tpu")


def resolve(
    operation: str,
    backend: Backend | None,
    *,
    refusal: str | None,
    kernel: Backend | None = None,
    tpu_refusal: str | None = None,
) -> Backend:
    """The implementation of a call: the named one, or the default one if it takes the operands.

    This is the only place where a default changes with the operands. Who must not run anything but
    the default, such as a benchmark, names it: `resolve(op, default_backend(op), ...)` raises.

    Args:
        operation: name of the operation.
        backend: the implementation that the caller named, if any.
        refusal: why the GPU kernel cannot take these operands, from its `supports`; None if it can.
        kernel: the GPU kernel for operands like these, if it is not that of `GPU_KERNELS`.
        tpu_refusal: as `refusal`, of the TPU kernel.

    Raises:
        NotImplementedError: if the named implementation cannot take the operands; with the reason.
    """
    chosen = backend or default_backend(operation)
    if chosen == "tpu":
        kernel, refusal = TPU_KERNELS.get(operation), tpu_refusal
    chosen, why = _resolve(operation, backend, refusal, kernel)
    heard = _heard.get()
    if heard is not None:
        heard.append(Decision(operation, chosen, why))
    return chosen


def _resolve(
    operation: str, backend: Backend | None, refusal: str | None, kernel: Backend | None
) -> tuple[Backend, str]:
    """The implementation, and why it is that one; see `resolve`."""
    chosen = backend or default_backend(operation)
    if chosen == "reference":
        return chosen, "named by the caller" if backend else _without_kernel(operation)
    kernel = kernel or GPU_KERNELS.get(operation)
    chosen = backend or kernel or chosen
    if chosen != kernel:
        raise NotImplementedError(f"{operation} has no {chosen} kernel for operands like these")
    refusal = refusal or _device_refusal(chosen)
    if refusal is None:
        return chosen, f"the {'TPU' if chosen == 'tpu' else 'GPU'} kernel for operands like these"
    if backend is None and operation not in HOST_OPERATIONS:
        return "reference", f"the {chosen} kernel cannot run this: {refusal}"
    raise NotImplementedError(f"the {chosen} kernel of {operation} cannot run this: {refusal}")


def _without_kernel(operation: str) -> str:
    """Why the reference is the default."""
    on_tpu = target().platform == "tpu"
    reason = TPU_WITHOUT_KERNEL.get(operation) if on_tpu else None
    return reason or "there is no kernel for this device"


def _device_refusal(backend: Backend) -> str | None:
    """Why the GPU that JAX runs on cannot run a kernel; None if it can, or without a GPU."""
    if backend != "mosaic" or jax.default_backend() != "gpu":
        return None
    capability = jax.devices()[0].compute_capability
    if capability == HOPPER:
        return None
    return f"it is for compute capability {HOPPER}, and this GPU has {capability}"
