"""The planner: what it says of the published deployment, and what its parts are made of."""

import dataclasses
import functools

import pytest

from bench.shard_cells import Cell
from bench.shard_memory import account
from bench.shard_setup import abstract_setup
from bench.traces import GLM_5_1
from dhisparse_jax.config import Policy
from dhisparse_jax.configs.gpus import GPUS, Speed
from dhisparse_jax.configs.presets import GLM_5_3
from dhisparse_jax.configs.workload import fetched, missed
from dhisparse_jax.models.glm.costs import StepLoad, exposed_seconds
from dhisparse_jax.models.glm.planner import Deployment, plan

PUBLISHED = Deployment(config=GLM_5_3, gpu=GPUS["h200"], gpus=8, context=100_000, concurrency=128)


@functools.cache
def planned(**changes):
    found = plan(dataclasses.replace(PUBLISHED, **changes))
    return {each.policy: each for each in found}


def test_the_published_deployment():
    found = planned()
    resident, fixed, adaptive = (found[policy] for policy in Policy)
    assert resident.fit.requests < fixed.fit.requests == adaptive.fit.requests == 16
    assert fixed.fit.hot_rows == 4096
    assert fixed.step.fetched_share == pytest.approx(0.134)  # as published
    assert adaptive.step.fetched_share < 0.03
    assert adaptive.tokens_per_s > fixed.tokens_per_s > 2 * resident.tokens_per_s
    assert fixed.memory.bytes["experts"] == pytest.approx(90.6e9, rel=0.01)
    for each in found.values():
        assert each.memory.device_bytes <= PUBLISHED.gpu.device_bytes
        assert each.step.seconds > each.step.floor


def test_a_draft_pays_more_with_residency():
    with_draft, without = planned(draft="dflash2"), planned()
    gain = {
        policy: with_draft[policy].tokens_per_s / without[policy].tokens_per_s for policy in Policy
    }
    assert gain[Policy.ADAPTIVE] > gain[Policy.FIXED] > 1
    slower = planned(draft="dflash2", accept_length=3.97)[Policy.ADAPTIVE]
    assert slower.tokens_per_s < with_draft[Policy.ADAPTIVE].tokens_per_s


@pytest.mark.parametrize("draft", ["none", "dflash2", "dspark"])
def test_memory_is_that_of_the_benchmark(draft):
    """The same cell on both sides; only what is replayed is beside it."""
    setup = abstract_setup(
        "glm-5.3", layers=None, context=100_000, room=0, draft=draft, requests=16, traces=16
    )
    each = planned(draft=draft)[Policy.ADAPTIVE]
    cell = Cell(name="", policy=each.policy, draft=draft, requests=16, hot_rows=each.fit.hot_rows)
    held = account(setup, cell)
    assert {**each.memory.bytes, "replayed": held.bytes["replayed"]} == held.bytes
    assert each.memory.host_bytes == held.host_bytes


def test_misses_are_those_of_the_traces():
    """An LRU cache misses what lies deeper in the stack than it has slots."""
    k, history = 256, 12_500
    ends, shares = GLM_5_1.bands(k, history)
    for place, end in enumerate(ends):
        deeper = shares[place + 1 :].sum()
        assert missed(end / k, history / k) == pytest.approx(deeper, abs=2e-3)
    assert missed(history / k, history / k) == 0


# Fetched by `bench.simulate`, calibrated, in units of K = 256: 60 steps of 2 requests at 12,500
# positions, with hot slots of so many K.
ONE_QUERY = {1: 0.290, 2: 0.132, 4: 0.066, 8: 0.0379, 14: 0.0211, 28: 0.00745}
FIVE_OF_EIGHT = {2: 0.831, 4: 0.330, 8: 0.189, 14: 0.107, 28: 0.0387}


@pytest.mark.parametrize(
    ("simulated", "union", "tokens"), [(ONE_QUERY, 1.0, 1.0), (FIVE_OF_EIGHT, 2.33, 5.0)]
)
def test_fetches_are_those_of_the_simulation(simulated, union, tokens):
    for budget, wanted in simulated.items():
        found = fetched(float(budget), 12_500 / 256, union, tokens)
        assert found == pytest.approx(wanted, rel=0.05)


def test_what_hides_the_retrieval():
    seconds = {"attend": 7.8e-3, "retrieve": 3e-3}
    load = StepLoad(requests=16, queries=1, context=100_000, attended=2048.0, fetched=290.0)
    assert exposed_seconds(GLM_5_3, load, seconds) == pytest.approx(3e-3 - 2.1e-3)
    several = dataclasses.replace(load, queries=8)
    assert exposed_seconds(GLM_5_3, several, seconds) == 3e-3


def test_a_slower_stage_makes_a_longer_step():
    share = PUBLISHED.gpu.speeds["experts"].share
    half, whole = ({**PUBLISHED.gpu.speeds, "experts": Speed(part)} for part in (share / 2, share))
    # A GPU has a dict, so its plan cannot be kept.
    slow, fast = (
        planned.__wrapped__(gpu=dataclasses.replace(PUBLISHED.gpu, speeds=speeds))[Policy.FIXED]
        for speeds in (half, whole)
    )
    assert slow.step.seconds - fast.step.seconds == pytest.approx(fast.step.stages["experts"])
