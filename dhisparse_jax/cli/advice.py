"""What a machine means for the hierarchy, and what to change about it. Knows only the document."""

from collections.abc import Mapping
from typing import Any

from dhisparse_jax.cli.machine import CACHE_VARIABLE

Document = Mapping[str, Any]

PINNED_SHARE = 0.8
"""Of host memory, that pinned memory may take: what is left runs the system."""

DEVICE_SHARE = 0.9
"""Of device memory, that JAX may take where nothing else runs there."""

CPU_MEANS = (
    "no accelerator: host and device memory are the same, so the hierarchy saves nothing here. "
    "Every command works, with the same tokens, through the exact reference of each operation; "
    "speeds say nothing about a GPU, and the rates above are those of copies within memory."
)
TPU_MEANS = (
    "every operation has a TPU kernel or is plain XLA, but none of it has ever run on a TPU: first "
    "run what the README names in 'On a TPU'. Nothing was measured here; to run on the CPU, set "
    "JAX_PLATFORMS=cpu"
)
OTHER_MEANS = (
    "this accelerator has no kernel that reads host memory, so the hierarchy cannot run on it: set "
    "JAX_PLATFORMS=cpu to run on the CPU"
)
GPU_MEANS = (
    "history lies in pinned host memory, which kernels read over the link; what is selected often "
    "lies in device memory"
)


def meaning(backend: str) -> str:
    """What it means to run on a backend of JAX."""
    return {"cpu": CPU_MEANS, "gpu": GPU_MEANS, "tpu": TPU_MEANS}.get(backend, OTHER_MEANS)


def advice(document: Document) -> list[str]:
    """What to change, the most important first; one line each."""
    found = [_unused_gpu, _pinned_limit, _device_share, _kernels, _cache]
    return [line for rule in found for line in rule(document)]


def _unused_gpu(document: Document) -> list[str]:
    if document["backend"] != "cpu" or document["versions"]["driver"] is None:
        return []
    return [
        f"there is an NVIDIA driver ({document['versions']['driver']}), but JAX runs on the CPU: "
        "pip install 'dhisparse-jax[cuda]', and unset JAX_PLATFORMS"
    ]


def _pinned_limit(document: Document) -> list[str]:
    host = document["host"]
    limit, memory = host["pinned_limit_bytes"], host["memory_bytes"]
    if limit is None:
        return []
    wanted, name = int(PINNED_SHARE * memory) >> 30, host["pinned_limit_variable"]
    now = f"{name} {'is' if host['pinned_limit_is_set'] else 'is not set, which means'}"
    if limit > memory:
        return [
            f"{now} {limit >> 30}, more than the {memory >> 30} GiB of host memory: "
            f"export {name}={wanted}"
        ]
    if limit >> 30 < wanted:
        return [
            f"{now} {limit >> 30} GiB of pinned memory for history, of {memory >> 30} GiB of host "
            f"memory: export {name}={wanted} before the command for more"
        ]
    return []


def _device_share(document: Document) -> list[str]:
    memory, limit = document["gpu_memory_bytes"], document["devices"][0]["memory_limit_bytes"]
    if document["backend"] != "gpu" or not memory or not limit or limit >= 0.85 * memory:
        return []
    return [
        f"JAX takes at most {limit >> 30} of the {memory >> 30} GiB of device memory: where "
        f"nothing else runs there, export XLA_PYTHON_CLIENT_MEM_FRACTION={DEVICE_SHARE}"
    ]


def _kernels(document: Document) -> list[str]:
    """Operations for which a GPU has only plain jnp, by the reason."""
    if document["backend"] != "gpu":
        return []
    plain: dict[str, set[str]] = {}
    for choice in document["kernels"]:
        if choice["backend"] == "reference":
            where = f"{choice['operation']} ({choice['format']})"
            plain.setdefault(choice["why"], set()).add(where)
    return [
        f"{', '.join(sorted(operations))}: runs as plain jnp, slowly, since {why}"
        for why, operations in plain.items()
    ]


def _cache(document: Document) -> list[str]:
    if why := document["compilation_cache_error"]:
        where = f"{CACHE_VARIABLE} is {document['compilation_cache']}"
        return [f"{where}, where nothing can be kept ({why}): set it to another folder"]
    if document["compilation_cache"]:
        return []
    return [f"short runs are mostly compilation: set {CACHE_VARIABLE} to a folder to keep it"]
