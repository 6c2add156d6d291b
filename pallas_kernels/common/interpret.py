"""Whether a TPU kernel is compiled or interpreted: resolved here, for all of them.

On a TPU, and in a program that is compiled ahead of time for one, it is compiled. Anywhere else it
runs in TPU interpret mode, on a CPU: memory spaces, DMAs and semaphores are simulated, memory that
nothing was written to holds NaN or the largest integer, what reads out of bounds raises, and copies
that race are found.
"""

import contextlib
from collections.abc import Generator

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.common.backends import target, targeting

COPIES_TOLD_APART = 255
"""By the detector of races. To it, copies that share a number seem to come one after the other, and
it gives numbers at random; without this there would be only one, and most races go unnoticed."""

INTERPRETED = pltpu.InterpretParams(
    detect_races=True,
    vector_clock_size=1 + COPIES_TOLD_APART,  # and the core
    dma_execution_mode="on_wait",  # a copy that nobody has waited for has not happened
    out_of_bounds_reads="raise",
    uninitialized_memory="nan",
)

CHIPS = {"v5e": "TPU v5 lite", "v6e": "TPU v6 lite"}
"""Generations of TPUs that programs are compiled for ahead of time, and what JAX calls the chip."""


def tpu_interpret() -> pltpu.InterpretParams | bool:
    """The `interpret` of a `pallas_call` for TPUs."""
    return False if target().compiled or jax.default_backend() == "tpu" else INTERPRETED


def interprets_tpu() -> bool:
    """Whether programs are made for a TPU, and run in interpret mode."""
    return target().platform == "tpu" and bool(tpu_interpret())


@contextlib.contextmanager
def ahead_of_time(generation: str) -> Generator[None, None, None]:
    """Programs that are traced in the body are for a TPU that is not there, and are compiled.

    Args:
        generation: one of CHIPS.
    """
    chip = AbstractDevice(CHIPS[generation], 1, "tpu")
    mesh = AbstractMesh((), (), abstract_device=chip)
    with targeting("tpu", compiled=True), use_abstract_mesh(mesh):
        yield
