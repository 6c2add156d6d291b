"""Steps with rows of other formats lower for a GPU, and only kernels touch the host pool."""

import re

import jax
import jax.numpy as jnp
import pytest

from dhisparse_jax import RowFormat, plugin
from dhisparse_jax.hierarchy import abstract
from pallas_kernels.common import backends
from tests.support.lowering import lowered
from tests.support.plugged import choose, sizes

GQA = RowFormat.gqa(2, 128, "bfloat16")
BYTES = RowFormat.opaque(640)
OPERATION = re.compile(r"stablehlo\.(\w+)[ (]")


def attending(step, layer, select):
    like = lambda *shape: jnp.zeros((*step.positions.shape, *shape), jnp.bfloat16)
    rows = like(2, 128), like(2, 128)
    return plugin.attend(step, layer, rows, like(16, 128), select=select)


def reading(step, layer, select):
    rows = jnp.zeros((*step.positions.shape, 640), jnp.uint8)
    return plugin.read(step, layer, rows, select=select)


@pytest.mark.parametrize(("row", "layer"), [(GQA, attending), (BYTES, reading)])
def test_steps_lower_for_a_gpu(monkeypatch, row, layer):
    kernel = lambda operation, platform=None: backends.GPU_KERNELS[operation]
    monkeypatch.setattr(backends, "default_backend", kernel)
    cfg = sizes(row, groups=(2,))

    def step(state):
        step = plugin.begin_step(state, cfg)
        first, step = layer(step, 0, choose(step.positions))
        second, step = layer(step, 1, None)
        return first, second, plugin.end_step(step)

    hlo = lowered(step, abstract(cfg)).splitlines()
    (pool,) = abstract(cfg).pools
    name = "tensor<{}x{}xi32>".format(*pool.host.shape)
    touching = {word for line in hlo if name in line for word in OPERATION.findall(line)}
    assert touching == {"custom_call"}
    assert jax.tree.leaves(pool.index_keys) == []
