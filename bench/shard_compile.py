"""Compiling the step of a cell from shapes, while weights and pools are made."""

import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from bench.shard_cells import Cell, abstract_operands, step_program
from bench.shard_setup import Setup
from bench.stages import scopes_of
from dhisparse_jax.hierarchy.state import HOST_LEAVES, host_sharding

_ONE_AT_A_TIME = threading.Lock()


class Program(NamedTuple):
    """A compiled step.

    Attributes:
        step: the executable.
        scopes: see `stages.scopes_of`.
        seconds: that compiling took, tracing included.
    """

    step: Any
    scopes: dict[str, str]
    seconds: float


def compile_step(setup: Setup, cell: Cell) -> Program:
    """Compile the step of a cell, from shapes."""
    begin = time.perf_counter()
    cfg = setup.config(cell)
    operands = abstract_operands(cfg, setup.drafter, setup.params, setup.draft_params)
    with _ONE_AT_A_TIME:  # Python; compilers of several programs may work at once
        program = step_program(setup.model, setup.drafter, cfg, setup.params)
        lowered = program.lower(*_placed(operands))
    step = lowered.compile()
    return Program(step, scopes_of(step.as_text() or ""), time.perf_counter() - begin)


def _placed(operands: Any) -> Any:  # noqa: ANN401  # any pytree
    """Shapes with the memory that each is in."""
    host, device = host_sharding(), SingleDeviceSharding(jax.devices()[0])

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Any:  # noqa: ANN401
        if getattr(path[-1], "name", "") in HOST_LEAVES:
            return in_host_memory(leaf, host)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)

    return jax.tree_util.tree_map_with_path(place, operands)


def in_host_memory(leaf: jax.ShapeDtypeStruct, host: SingleDeviceSharding) -> Any:  # noqa: ANN401
    """A shape of an array in host memory."""
    if jax.__version_info__ < (0, 11):  # no shape can say so, but an array can
        return jax.device_put(np.zeros(leaf.shape, leaf.dtype), host)
    moved = jax.eval_shape(lambda array: jax.device_put(array, jax.memory.Space.Host), leaf)
    return moved.update(sharding=host)
