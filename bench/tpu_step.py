"""The decode step of one device's share of GLM-5.x, compiled for a TPU that is not there.

What the compiler says of memory is of the program as it would run: how much of the host pools is
updated in place, and whether any of them is copied.
"""

import contextlib
import math
import os
import time
from collections.abc import Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bench.shard_cells import Cell, abstract_operands
from bench.shard_segments import lowered, segments
from bench.shard_setup import Setup
from dhisparse_jax.hierarchy.state import HOST_KIND, HOST_LEAVES
from dhisparse_jax.step import Speculation
from pallas_kernels.common.interpret import ahead_of_time

TOPOLOGIES = {"v5e:2x2": "v5e", "v6e:2x2": "v6e"}
"""Topologies that there are, and the generation of their chips."""

RESERVED_BYTES = 1 << 28
"""Of device memory, beside the operands of a step: for its programs, and what they compute."""


class TpuProgram(NamedTuple):
    """A compiled step.

    Attributes:
        compiled: what JAX says of it.
        pool_bytes: bytes of the host arrays among its operands.
        seconds: that compiling took, tracing included.
    """

    compiled: Any
    pool_bytes: int
    seconds: float


def one_device(topology: str) -> Mesh:
    """A mesh of one device of a topology; libtpu describes it, no TPU is needed.

    Raises:
        RuntimeError: libtpu is not installed.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else libtpu looks for a cloud's metadata
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # there is no TPU to be fought for
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return Mesh(np.array(described.devices[:1]), "device")


def compile_for_tpu(function: Any, operands: Any, topology: str) -> TpuProgram:  # noqa: ANN401
    """Compile a jitted function for operands of such shapes, those of HOST_LEAVES in host memory.

    Args:
        function: jitted.
        operands: its positional arguments; a pytree of shapes.
        topology: one of TOPOLOGIES.
    """
    begin = time.perf_counter()
    mesh = one_device(topology)
    shapes, pool_bytes = _placed(operands, mesh)
    with ahead_of_time(TOPOLOGIES[topology]), _not_kept():
        lowered = function.trace(*shapes).lower(lowering_platforms=("tpu",))
        compiled = lowered.compile()
    return TpuProgram(compiled, pool_bytes, time.perf_counter() - begin)


@contextlib.contextmanager
def _not_kept() -> Generator[None, None, None]:
    """No program goes into JAX's persistent cache: without a TPU, none can be read from there."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


def compile_operands(setup: Setup, cell: Cell, topology: str) -> TpuProgram:
    """Compile a program that has all operands of a step in memory, and does nothing with them.

    It takes another operand of RESERVED_BYTES, so that it compiles if a step fits into the memory
    that libtpu lets programs have; otherwise JAX raises what libtpu says. It takes seconds, where
    a step takes many minutes.
    """
    reserved = jax.ShapeDtypeStruct((RESERVED_BYTES,), jnp.int8)
    with ahead_of_time(TOPOLOGIES[topology]):
        cfg = setup.config(cell)
        operands = abstract_operands(cfg, setup.drafter, setup.params, setup.draft_params)
    program = jax.jit(lambda *_: jnp.zeros(8), keep_unused=True)
    return compile_for_tpu(program, (reserved, *operands), topology)


def compile_tpu_step(setup: Setup, cell: Cell, topology: str) -> dict[str, TpuProgram]:
    """Compile the programs that a decode step is dispatched as (`shard_segments`), by name."""
    programs: dict[str, TpuProgram] = {}
    mesh = one_device(topology)
    with ahead_of_time(TOPOLOGIES[topology]), _not_kept():
        cfg = setup.config(cell)
        operands = abstract_operands(cfg, setup.drafter, setup.params, setup.draft_params)
        step = segments(setup.model, Speculation(setup.drafter), cfg)
        shapes, _ = _placed((*operands, step.between(*operands[:4])), mesh)
        begin = time.perf_counter()
        for which, program in lowered(step, shapes):
            compiled = program.compile()
            host_bytes = compiled.memory_analysis().host_argument_size_in_bytes
            now = time.perf_counter()
            programs[which.name] = TpuProgram(compiled, host_bytes, now - begin)
            begin = now
    return programs


def _placed(operands: Any, mesh: Mesh) -> tuple[Any, int]:  # noqa: ANN401  # any pytree
    """Shapes with the memory that each is in, and the bytes in host memory."""
    host_bytes = 0

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Any:  # noqa: ANN401
        nonlocal host_bytes
        on_host = getattr(path[-1], "name", "") in HOST_LEAVES
        host_bytes += leaf.size * leaf.dtype.itemsize if on_host else 0
        # A NamedSharding: the aval of a shape with a SingleDeviceSharding is not in host memory.
        kind = HOST_KIND if on_host else None
        sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, operands), host_bytes
