"""A dense model with indexers over the hierarchy: what it says is independent of the policy."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax import HierarchyConfig, Policy, plugin
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy import check_invariants
from dhisparse_jax.models.llama.attend import causal
from dhisparse_jax.models.llama.decode import feeder, geometry, read_prompt
from dhisparse_jax.models.llama.indexers import load_indexers, save_indexers
from dhisparse_jax.models.llama.whole import run_layers
from dhisparse_jax.models.params import flatten, params_of
from tests.support.small_llama import FITTED, indexers, model, tokens

PROMPT, QUERIES, TOP_K = 24, 2, 8


@cache
def fed(policy, top_k=TOP_K):
    """Logits of the tokens after the prompt, and the records that came from the host."""
    cfg = HierarchyConfig(
        geometry=geometry(model(), indexers(), top_k),
        policy=policy,
        requests=1,
        capacity=len(tokens()),
        hot_rows=16,
        queries=QUERIES,
    )
    read = read_prompt(model(), indexers(), tokens()[:PROMPT], top_k)
    state = jax.jit(plugin.admit, static_argnums=1)(plugin.init(cfg), cfg, 0, read.rows, read.keys)
    feed, logits, fetched = feeder(model(), indexers(), cfg), [], 0
    for start in range(PROMPT, len(tokens()), QUERIES):
        state, told = feed(state, tokens()[None, start : start + QUERIES])
        logits.append(np.asarray(told[0]))
        fetched += int(state.counts.fetched.sum())
    assert all(check_invariants(state, cfg).values())
    return np.concatenate(logits), fetched


@pytest.mark.parametrize(
    "policy", [Policy.FIXED, pytest.param(Policy.ADAPTIVE, marks=pytest.mark.slow)]
)
def test_policies_agree_bit_by_bit(policy):
    logits, fetched = fed(policy)
    np.testing.assert_array_equal(logits, fed(Policy.RESIDENT)[0])
    assert fetched > 0
    assert fed(Policy.RESIDENT)[1] == 0


def test_logits_are_those_of_masked_attention():
    hidden = read_prompt(model(), indexers(), tokens(), TOP_K).hidden
    logits, _ = fed(Policy.FIXED)
    np.testing.assert_allclose(logits, model().logits(hidden[PROMPT:]), rtol=0, atol=1e-4)


@pytest.mark.slow  # tests/models/train_indexer/test_fit.py has it for masked attention
def test_to_select_everything_is_to_be_dense():
    seen = causal(len(tokens()))
    dense = model().logits(run_layers(model(), tokens(), lambda view: seen))[PROMPT:]
    logits, _ = fed(Policy.RESIDENT, len(tokens()))
    np.testing.assert_allclose(logits, dense, rtol=0, atol=1e-4)
    assert np.abs(fed(Policy.FIXED)[0] - dense).max() > 0.1  # and to select less is not


def test_indexers_are_saved_and_found_again(tmp_path):
    params = params_of(indexers())
    save_indexers(tmp_path, FITTED, params)
    found = load_indexers(tmp_path, model().config)
    assert found.config == FITTED
    for name, array in flatten(params_of(found)).items():
        np.testing.assert_array_equal(array, jnp.asarray(flatten(params)[name]))


def test_indexers_of_another_model_are_refused(tmp_path):
    save_indexers(tmp_path, FITTED, params_of(indexers()))
    other = type(model().config)(**(vars(model().config) | {"num_layers": 3}))
    with pytest.raises(UserError, match="are for 2 layers of 64"):
        load_indexers(tmp_path, other)
