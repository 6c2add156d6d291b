"""Compiling the step of a cell from shapes, while weights and pools are made."""

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from bench.shard_cells import Cell, abstract_operands
from bench.shard_programs import Between
from bench.shard_segments import Segments, Which, compiled, lowered, segments
from bench.shard_setup import Setup
from bench.stages import Traced, traced
from dhisparse_jax.hierarchy.state import HOST_LEAVES, host_sharding
from dhisparse_jax.step import Speculation


@dataclasses.dataclass(frozen=True)
class Compilers:
    """What compiles programs of several cells at the same time.

    The compiler tries how to multiply matrices of each shape, on the device, and remembers. So of
    the cells with as many tokens in a step one compiles a program before any others: else all try
    the same.

    Attributes:
        pool: the compilers.
        tracing: Python, which is for one at a time.
        first: that program, by the number of tokens.
    """

    pool: Executor
    tracing: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    first: dict[int, Future[Any]] = dataclasses.field(default_factory=dict)


class Program(NamedTuple):
    """A compiled step.

    Attributes:
        load: makes its programs; the copies that groups have are large, so when the cell runs.
        between: shapes of what goes from program to program.
        kernels: what each says of its kernels, by its name.
        seconds: that compiling took, tracing included.
    """

    load: Callable[[], Segments]
    between: Between
    kernels: dict[str, Traced]
    seconds: float


def compile_step(setup: Setup, cell: Cell, compilers: Compilers) -> Program:
    """Compile the programs of a cell's step, from shapes, side by side."""
    begin = time.perf_counter()
    cfg = setup.config(cell)
    operands = abstract_operands(cfg, setup.drafter, setup.params, setup.draft_params)
    step = segments(setup.model, Speculation(setup.drafter), cfg)
    most, tokens = Which("groups", max(step.groups)), cfg.requests * cfg.queries
    compiling: dict[Which, Future[Any]] = {}
    with compilers.tracing:
        placed = _placed(operands)
        between = step.between(*placed[:4])
        programs = dict(lowered(step, (*placed, _placed(between))))
        if tokens not in compilers.first:  # in the last group all layers have experts
            compilers.first[tokens] = compilers.pool.submit(programs.pop(most).compile)
            compiling[most] = compilers.first[tokens]
    wait([compilers.first[tokens]])
    compiling |= {which: compilers.pool.submit(each.compile) for which, each in programs.items()}
    made = {which: future.result() for which, future in compiling.items()}
    return Program(
        load=partial(compiled, step, made),
        between=between,
        kernels={which.name: traced(program.as_text() or "") for which, program in made.items()},
        seconds=time.perf_counter() - begin,
    )


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
