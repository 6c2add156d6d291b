"""Where positions lie in the host pools, and what a request takes over from another one."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.errors import UserError
from dhisparse_jax.geometry import Geometry, RowFormat
from dhisparse_jax.hierarchy import layout, requests
from dhisparse_jax.hierarchy.admit import admit_prompt
from dhisparse_jax.hierarchy.backup import backup
from dhisparse_jax.hierarchy.plan import plan
from dhisparse_jax.hierarchy.retrieve import retrieve, retrieve_attend
from dhisparse_jax.hierarchy.state import abstract, init
from pallas_kernels.common import backends
from pallas_kernels.common.ids import INT32_MAX, NO_SLOT
from tests.support.lowering import lowered

GLM = HierarchyConfig(
    geometry=Geometry(
        row=RowFormat(width=576, value_width=512, dtype="bfloat16"),
        layers_per_pool=(1, 4),
        top_k=2048,
        index_width=128,
        index_dtype="bfloat16",
        scale=256**-0.5,
    ),
    policy=Policy.FIXED,
    requests=16,
    capacity=100_000,
    hot_rows=8192,
)
"""Pools of GLM-5.3 at full size, as shapes."""

OPERATION = re.compile(r"stablehlo\.(\w+)[ (]")

SMALL = dataclasses.replace(GLM, requests=2, capacity=2048, hot_rows=2048, host_page=16)


def test_rows_by_hand():
    """Pages 7 and 2 of 16 positions: position 20 is the fifth of page 2."""
    pages = jnp.array([[7, 2, NO_SLOT], [0, 2, 5]], jnp.int32)
    position = jnp.array([[0, 20, 32, NO_SLOT, 48, -2], [0, 20, 32, NO_SLOT, 48, INT32_MAX]])
    none = INT32_MAX
    assert layout.host_rows(SMALL, 0, pages, position).tolist() == [
        [112, 36, none, NO_SLOT, none, none],
        [0, 36, 80, NO_SLOT, none, none],
    ]


def test_rows_have_pages_of_their_own_by_default():
    state = jax.jit(partial(requests.join, cfg=SMALL))(
        init(SMALL), request=jnp.int32(1), length=jnp.int32(5)
    )
    assert np.asarray(state.host_page_of).tolist() == [[-1] * 128, [*range(128, 256)]]


def test_too_few_pages_are_nobodys():
    few = dataclasses.replace(SMALL, host_pages=255)
    with pytest.raises(UserError, match="255 host pages are not enough for 2 rows of 128 each"):
        requests.join(init(few), few, jnp.int32(0), jnp.int32(5))
    with pytest.raises(UserError, match="host_page_count is 0; it must be at least 1"):
        dataclasses.replace(SMALL, host_pages=0)


def ids(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def shared_prompt(state, request, length, pages, source, records, keys):
    """Everything that a prompt goes through which begins as another one."""
    state = requests.join(state, GLM, request, length, pages)
    records = requests.recall(state, GLM, 1, source, length, records)
    keys = jnp.where(length > 5, requests.recall_keys(state, GLM, 1, source, length), keys)
    return admit_prompt(state, GLM, 1, request, records, keys, length)


def step(state, selection, query, start):
    planned, state = plan(state, GLM, 1, selection)
    state = retrieve(state, GLM, 0, planned)
    values, state = retrieve_attend(state, GLM, 1, 0, planned, selection, query)
    return values, backup(state, GLM, start)


def test_gpu_kernels_lower_at_full_size(monkeypatch):
    """No operation but a kernel touches a host pool."""
    kernel = lambda operation, platform=None: backends.GPU_KERNELS[operation]
    monkeypatch.setattr(backends, "default_backend", kernel)
    state, pages = abstract(GLM), ids(GLM.row_pages)
    like = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    prompt = (ids(GLM.capacity, GLM.record_words(1)), like(jnp.bfloat16, GLM.capacity, 128))
    query = like(jnp.bfloat16, 16, 1, 64, 576)
    for call, operands in (
        (shared_prompt, (ids(), ids(), pages, pages, *prompt)),
        (step, (ids(16, 1, 2048), query, ids(16))),
    ):
        hlo = lowered(call, state, *operands).splitlines()
        for array in (array for pool in state.pools for array in (pool.host, pool.host_keys)):
            name = "tensor<{}x{}xi32>".format(*array.shape)
            touching = {word for line in hlo if name in line for word in OPERATION.findall(line)}
            assert touching <= {"custom_call"}
    assert "custom_call" in touching
