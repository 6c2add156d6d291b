"""Programs compiled for TPUs that are not there: no host pool is copied."""

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from bench.shard_cells import Cell, abstract_operands
from bench.shard_setup import abstract_setup
from bench.tpu_step import TOPOLOGIES, compile_for_tpu, compile_tpu_step
from dhisparse_jax.config import Policy
from dhisparse_jax.engine.output import packed_steps
from dhisparse_jax.pytree import state
from dhisparse_jax.step import Speculation
from pallas_kernels.backup.api import backup
from pallas_kernels.common.interpret import ahead_of_time
from pallas_kernels.retrieve.api import retrieve
from pallas_kernels.retrieve.types import Fetches, Moves

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu is not installed: pip install -e '.[tpu]'",
    ),
    pytest.mark.parametrize("topology", TOPOLOGIES),
]


@state
class Pools:
    """Host pools and slots, named as in a state."""

    host: jax.Array
    host_keys: jax.Array
    slots: jax.Array


def words(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def pools(lines):
    return Pools(
        host=words(50_000, lines, 128),
        host_keys=words(50_000, 8, 128),
        slots=words(900, lines, 128),
    )


def check_no_copy(program):
    """All host bytes are results in the place of operands, and nothing else is in host memory."""
    memory = program.compiled.memory_analysis()
    assert program.pool_bytes > 0
    assert memory.host_argument_size_in_bytes == program.pool_bytes
    assert memory.host_output_size_in_bytes == program.pool_bytes
    assert memory.host_alias_size_in_bytes == program.pool_bytes
    assert memory.host_temp_size_in_bytes == 0
    copies = [line for line in program.compiled.as_text().splitlines() if " copy" in line]
    assert not [line for line in copies if "S(5)" in line]


@pytest.mark.parametrize("lines", [8, 16])
def test_a_loop_of_retrievals_and_backups_copies_no_host_pool(topology, lines):
    def step(carry, fetches):
        slots = retrieve(carry.host, carry.slots, fetches, Moves(fetches.rows[0], fetches.rows[1]))
        keys = jnp.broadcast_to(slots[:4, :8] + 1, (4, 8, 128))
        host, host_keys = backup(
            [carry.host, carry.host_keys], [slots, keys], fetches.rows[0], fetches.targets[:2]
        )
        return Pools(host=host, host_keys=host_keys, slots=slots), None

    loop = jax.jit(lambda *operands: jax.lax.scan(step, *operands)[0], donate_argnums=0)
    fetches = Fetches(words(3, 2, 64), words(3, 2, 64), words(3, 2))
    check_no_copy(compile_for_tpu(loop, (pools(lines), fetches), topology))


def test_a_copied_pool_is_noticed(topology):
    twice = jax.jit(
        lambda mine, rows: (
            backup([mine.host], [mine.slots], rows, rows[None])[0],
            backup([mine.host], [mine.slots], rows + 1, rows[None])[0],
        )
    )
    program = compile_for_tpu(twice, (pools(8), words(4)), topology)
    with pytest.raises(AssertionError):
        check_no_copy(program)


def compile_whole_step(setup, cell, topology):
    """A decode step as one program, as an engine dispatches it."""
    with ahead_of_time(TOPOLOGIES[topology]):
        cfg = setup.config(cell)
        params, *others = abstract_operands(cfg, setup.drafter, setup.params, setup.draft_params)
    weights, form = jax.tree.flatten(params)
    step = partial(packed_steps, 1, setup.model, Speculation(setup.drafter), cfg, form)
    program = jax.jit(step, donate_argnums=(3, 4))
    return compile_for_tpu(program, (weights, *others), topology)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_a_decode_step_copies_no_host_pool(topology, whole):
    """As one program, as an engine dispatches it, and as the decode benchmark's programs."""
    setup = abstract_setup(
        "tiny", layers=None, context=512, room=64, draft="none", requests=2, traces=1
    )
    cell = Cell(name="tpu", policy=Policy.ADAPTIVE, draft="none", requests=2, hot_rows=64)
    if whole:
        check_no_copy(compile_whole_step(setup, cell, topology))
        return
    programs = compile_tpu_step(setup, cell, topology).values()
    with_pools = [program for program in programs if program.pool_bytes]
    assert len(with_pools) >= 2
    for program in with_pools:
        check_no_copy(program)
