"""The state under JAX's own tools: shapes, ahead of time, checkpoints, vmap, several devices."""

import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from dhisparse_jax import Policy, UserError, plugin
from dhisparse_jax.hierarchy.places import BY_POOL, name_of
from tests.support.plugged import admitted, sizes, unrolled

ROOT = Path(__file__).parents[2]
CFG = sizes(groups=(1, 2))


def is_like(state, shapes):
    """Whether all arrays have the shapes, dtypes and memory that they should."""
    like = lambda leaf, shape: (
        (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)
        and leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim)
        and leaf.sharding.memory_kind == shape.sharding.memory_kind
    )
    return jax.tree.all(jax.tree.map(like, state, shapes))


@cache
def programs():
    """Admission and a step, compiled ahead of time from shapes alone."""
    shapes = plugin.abstract(CFG)
    admit = jax.jit(partial(admitted, cfg=CFG), donate_argnums=0).lower(shapes).compile()
    step = jax.jit(partial(unrolled, cfg=CFG), donate_argnums=0).lower(shapes).compile()
    return admit, step


def test_shapes_and_places_are_those_of_the_state():
    for policy in Policy:
        cfg = sizes(policy=policy)
        assert is_like(plugin.init(cfg), plugin.abstract(cfg))
    _, after = jax.eval_shape(partial(unrolled, cfg=CFG), plugin.abstract(CFG))
    same = lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype)
    assert jax.tree.all(jax.tree.map(same, after, plugin.abstract(CFG)))


def test_a_step_is_compiled_once():
    step = jax.jit(unrolled, static_argnums=1, donate_argnums=0)
    state = plugin.init(CFG)
    for _ in range(3):
        _, state = step(state, CFG)
    assert step._cache_size() == 1


def test_programs_from_shapes_take_the_state():
    admit, step = programs()
    state = admit(plugin.init(CFG))
    assert is_like(state, plugin.abstract(CFG))
    values, state = step(state)
    assert is_like(state, plugin.abstract(CFG))
    assert np.isfinite(values).all()


def test_a_checkpoint_goes_on_where_it_was_made(tmp_path):
    admit, step = programs()
    _, state = step(admit(plugin.init(CFG)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "state", plugin.abstract(CFG))
    assert is_like(back, plugin.abstract(CFG))
    for mine, wanted in zip(jax.tree.leaves(step(back)), jax.tree.leaves(step(state)), strict=True):
        np.testing.assert_array_equal(mine, wanted)


def test_a_stack_of_states_is_mapped_over():
    admit, step = programs()
    one = jax.device_get(admit(plugin.init(CFG)))
    two = jax.device_get(step(admit(plugin.init(CFG)))[1])
    spec = plugin.abstract(CFG)
    stack = jax.tree.map(
        lambda a, b, like: jax.device_put(np.stack([a, b]), like.sharding), one, two, spec
    )
    values, _ = jax.jit(jax.vmap(partial(unrolled, cfg=CFG)))(stack)
    for found, state in zip(values, (one, two), strict=True):
        state = jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), state, spec)
        np.testing.assert_allclose(found, step(state)[0], rtol=1e-6, atol=1e-6)


def test_whatever_begins_with_pools_and_requests_is_split_over_requests():
    cfg = sizes(
        groups=(1, 2, 1), policy=Policy.ADAPTIVE, requests=5, hot_rows=16, record_selections=True
    )
    leaves = jax.tree.leaves_with_path(plugin.abstract(cfg))
    assert {name_of(path) for path, leaf in leaves if leaf.shape[:2] == (3, 5)} == BY_POOL


@pytest.mark.parametrize("make", [plugin.init, plugin.abstract])
def test_a_mesh_and_its_axis_are_given_together(make):
    mesh = jax.make_mesh((1,), ("data",))
    with pytest.raises(UserError, match=r"mesh of 1 devices, but no axis .*: give one of 'data'"):
        make(CFG, mesh)
    with pytest.raises(UserError, match="an axis, 'data', but no mesh"):
        make(CFG, axis="data")


SHARDED = """
import jax, numpy as np
from functools import partial
from jax.sharding import PartitionSpec as P
from dhisparse_jax import Policy, plugin
from tests.support.plugged import admitted, scanned, sizes, unrolled

cfg, mesh = sizes(), jax.make_mesh((2,), ("data",))
specs = plugin.partition_specs(cfg, "data")
over = partial(jax.shard_map, mesh=mesh)  # which checks what differs between devices
admit = jax.jit(over(partial(admitted, cfg=cfg), in_specs=(specs,), out_specs=specs))
step = jax.jit(over(partial(unrolled, cfg=cfg), in_specs=(specs,), out_specs=(P("data"), specs)),
               donate_argnums=0)
state = admit(plugin.init(cfg, mesh, "data"))
alone = jax.jit(admitted, static_argnums=1)(plugin.init(cfg), cfg)
shapes = plugin.abstract(cfg, mesh, "data")
for _ in range(2):
    values, state = step(state)
    wanted, alone = jax.jit(unrolled, static_argnums=1)(alone, cfg)
    np.testing.assert_array_equal(values, np.concatenate([wanted, wanted]))
    for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(shapes), strict=True):
        assert leaf.shape == like.shape and leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
cfg = sizes(policy=Policy.ADAPTIVE)
specs = plugin.partition_specs(cfg, "data")
step_of = over(partial(scanned, cfg=cfg), in_specs=(specs,), out_specs=(P("data"), specs))
jax.eval_shape(step_of, plugin.abstract(cfg, mesh, "data"))
print(state.pools[0].host.sharding.memory_kind, step._cache_size())
"""


def test_two_devices_have_a_hierarchy_each():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    found = subprocess.run(
        [sys.executable, "-c", SHARDED],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout.split() == ["pinned_host", "1"], found.stderr[-2000:]
