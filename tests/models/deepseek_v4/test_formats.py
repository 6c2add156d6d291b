"""DeepSeek-V4 with its history in small formats: rows and index keys, as released and otherwise."""

import dataclasses
from functools import cache

import numpy as np
import pytest
from flax import nnx

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.configs.formats import COMPUTED
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.models.deepseek_v4.decode import serve
from dhisparse_jax.models.deepseek_v4.model import V4Model
from dhisparse_jax.models.hf import load_hf
from tests.support.serving import forced
from tests.support.small_v4 import CONTEXT, FIXTURE, HOST_PAGE, POLICIES, TOKENS

KEY = 32
"""Numbers of an index key: a power of two, which those of the fixture are not."""


@cache
def served(rows, keys):
    config = dataclasses.replace(load_hf(FIXTURE).config, index_dim=KEY)
    return serve(V4Model(config, rngs=nnx.Rngs(0), dtype=np.float32), "float32", rows, keys)


def logits(rows, keys, policy, queries):
    """The logits of every token, and the records that were fetched."""
    model, params = served(rows, keys)
    name, hot_rows = POLICIES[policy]
    cfg = HierarchyConfig(
        geometry=model.geometry,
        policy=Policy(name),
        requests=1,
        capacity=CONTEXT,
        queries=queries,
        hot_rows=hot_rows,
        tail=max(2, 2 * queries),
        host_page=HOST_PAGE,
    )
    return forced(Engine(model, params, cfg, chunk=5), TOKENS, 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "keys", "queries"),
    [("fp8", "fp4", 1), ("fp8", "fp4", 4), ("bfloat16", "fp8", 1), (COMPUTED, "fp4", 4)],
)
def test_policies_give_the_same_bits(rows, keys, queries):
    expected, none = logits(rows, keys, "resident", queries)
    assert none == 0
    for policy in ("fixed", "adaptive"):
        found, fetched = logits(rows, keys, policy, queries)
        assert np.array_equal(found, expected)
        assert fetched > 0 or policy == "adaptive"
    # Rounding shows, or nothing would be compared.
    plain, _ = logits(COMPUTED, COMPUTED, "resident", queries)
    assert np.abs(expected - plain).max() > 1e-3
