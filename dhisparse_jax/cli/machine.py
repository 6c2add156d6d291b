"""What `dhisparse doctor` knows of a machine before it measures anything."""

import importlib.metadata
import os
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

PACKAGES = ("dhisparse-jax", "jax", "jaxlib", "flax")
CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"


def versions() -> dict[str, str | None]:
    """Versions of what computes; None for the driver where there is no NVIDIA one."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    found |= {name: importlib.metadata.version(name) for name in PACKAGES}
    return {**found, "driver": nvidia("driver_version") or None}


def nvidia(field: str) -> str:
    """What `nvidia-smi` says of the first GPU; empty where there is none."""
    return first_line("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits")


def first_line(*command: str) -> str:
    """First line that a command prints; empty where there is no such command."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else ""


def devices() -> list[dict[str, Any]]:
    """Devices that JAX uses, with the memories that they address. Sizes in bytes, None: unknown."""
    import jax

    found = []
    for device in jax.devices():
        stats = device.memory_stats() or {}
        found.append(
            {
                "id": device.id,
                "platform": device.platform,
                "kind": device.device_kind,
                "compute_capability": getattr(device, "compute_capability", None),
                "memory_kinds": sorted({memory.kind for memory in device.addressable_memories()}),
                "memory_limit_bytes": stats.get("bytes_limit"),
                "memory_in_use_bytes": stats.get("bytes_in_use"),
            }
        )
    return found


def host() -> dict[str, Any]:
    """Host memory in bytes; the pinned limit is None where none is known to hold."""
    import jax
    import psutil

    from dhisparse_jax.engine.memory import PINNED_LIMIT_VARIABLE, pinned_limit_bytes
    from dhisparse_jax.hierarchy.state import host_sharding

    memory = psutil.virtual_memory()
    on_gpu = jax.default_backend() == "gpu"
    return {
        "memory_bytes": memory.total,
        "free_bytes": memory.available,
        "pools_memory_kind": host_sharding().memory_kind or "that of the device",
        "pinned_limit_bytes": pinned_limit_bytes() if on_gpu else None,
        "pinned_limit_variable": PINNED_LIMIT_VARIABLE,
        "pinned_limit_is_set": PINNED_LIMIT_VARIABLE in os.environ,
    }


def gpu_memory_bytes() -> int | None:
    """Memory of the first NVIDIA GPU, whether or not JAX uses it."""
    mebibytes = nvidia("memory.total")
    return int(mebibytes) << 20 if mebibytes.isdecimal() else None


def unwritable(folder: str | None) -> str | None:
    """Why nothing can be kept in a folder of this machine, or made there; None where it can."""
    if folder is None or "://" in folder:
        return None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror
