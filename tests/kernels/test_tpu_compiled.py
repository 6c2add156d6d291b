"""The shapes of all shared cases, compiled for TPUs that are not there."""

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from bench.tpu_cases import HostPool
from bench.tpu_step import TOPOLOGIES, compile_for_tpu
from pallas_kernels.backup import api as backup_api
from pallas_kernels.backup import cases as backup_cases
from pallas_kernels.common.record_layout import TILES, as_records
from pallas_kernels.index_scores import api as scores_api
from pallas_kernels.index_scores import cases as scores_cases
from pallas_kernels.retrieve import api as retrieve_api
from pallas_kernels.retrieve import cases as retrieve_cases
from pallas_kernels.sparse_attention import api as attention_api
from pallas_kernels.sparse_attention import cases as attention_cases
from pallas_kernels.top_k import api as top_k_api
from pallas_kernels.top_k import cases as top_k_cases
from tests.support import attention

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu is not installed: pip install -e '.[tpu]'",
    ),
]


def shapes(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def tiles(pool):
    return jax.eval_shape(lambda words: as_records(words, TILES), shapes(jnp.asarray(pool)))


def attended(inputs):
    run = partial(attention_api.sparse_attention, backend="tpu", **attention.options(inputs))
    return run, shapes(attention.arguments(inputs)), attention.options(inputs)


def scored(inputs):
    return partial(scores_api.index_scores, backend="tpu"), shapes(tuple(inputs)), None


def selected(inputs):
    scores, k = inputs
    return partial(top_k_api.top_k, backend="tpu", k=k), shapes((scores,)), k


def retrieved(inputs):
    def run(pool, slots, *lists):
        return retrieve_api.retrieve(pool.host, slots, *lists, backend="tpu")

    lists = shapes((inputs.fetches, inputs.moves))
    return run, (HostPool(tiles(inputs.host)), tiles(inputs.slots), *lists), None


def backed_up(inputs):
    def run(pools, slots, rows, sources):
        hosts, arrays = [pool.host for pool in pools], [slots[n] for n in inputs.slots_of]
        return backup_api.backup(hosts, arrays, rows, sources, backend="tpu")

    pools = tuple(HostPool(tiles(host)) for host in inputs.hosts)
    slots = tuple(map(tiles, inputs.slots))
    return run, (pools, slots, *shapes((inputs.rows, inputs.sources))), inputs.slots_of


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(
    ("call", "cases"),
    [
        (attended, attention_cases.CASES),
        (scored, scores_cases.CASES),
        (selected, top_k_cases.CASES),
        (retrieved, retrieve_cases.CASES),
        (backed_up, backup_cases.CASES),
    ],
)
def test_every_case_compiles(call, cases, topology):
    """Cases of the same shapes once."""
    compiled = set()
    for make in cases.values():
        run, operands, options = call(make())
        if (key := str((operands, options))) not in compiled:
            compile_for_tpu(jax.jit(run), operands, topology)
            compiled.add(key)
    assert len(compiled) > 5
