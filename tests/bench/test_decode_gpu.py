"""What the decode benchmark is made of: its state, its account, and what it replays."""

import dataclasses
import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.pinned import placed
from bench.replayed import accepted_proposals, followed, selections
from bench.script import Script
from bench.shard_cells import Cell, decode_state, no_profile, replaying
from bench.shard_experts import expert_room, run_experts, uniform_picks
from bench.shard_figures import reached
from bench.shard_glm import split
from bench.shard_load import draft_of, paths, replay_arrays
from bench.shard_memory import account, fitted
from bench.shard_products import gated, sums_of_each
from bench.shard_replay import ShardParams
from bench.shard_report import ratios
from bench.shard_segments import segments, zeros_like
from bench.shard_setup import abstract_setup, host_requests, shard_of
from bench.shard_state import host_pools, hosts_of, patterns, warm_state
from bench.shard_sweep import KEPT, bounded, compared_with_resident, row_of
from bench.shard_weights import abstract_weights, random_like
from bench.simulator import Simulator
from bench.stages import Event, Kernel, Traced, by_stage, timeline
from dhisparse_jax.config import Policy
from dhisparse_jax.configs.gpus import H200, Rates
from dhisparse_jax.configs.presets import GLM_5_3, TINY
from dhisparse_jax.configs.workload import PUBLISHED_SURVIVAL, survival_for, tokens_per_step
from dhisparse_jax.engine.output import packed_steps, places, unpacked
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy.invariants import check_invariants
from dhisparse_jax.hierarchy.state import abstract, host_sharding
from dhisparse_jax.models.glm.costs import StepLoad, step_seconds, step_work, weight_bytes
from dhisparse_jax.models.share import rounded
from dhisparse_jax.step import Speculation

CONTEXT = 300


def setup_of(draft="none", model="tiny", layers=6, **sizes):
    asked = {"context": CONTEXT, "room": 40, "requests": 3, "traces": 4, "gpus": 2}
    return abstract_setup(model, layers=layers, draft=draft, **{**asked, **sizes})


def cell_of(policy, requests=3, hot_rows=128):
    return Cell(name="x", policy=policy, draft="none", requests=requests, hot_rows=hot_rows)


def size_of(tree):
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("policy", "model"), [*((policy, "tiny") for policy in Policy), ("adaptive", "tiny-v4.1")]
)
def test_the_state_is_as_requests_leave_it(policy, model):
    setup = setup_of(model=model)
    cfg = setup.config(cell_of(Policy(policy), hot_rows=2 * setup.model.config.index_top_k))
    made = patterns(cfg)
    state = warm_state(cfg, made, host_pools(cfg, made), CONTEXT)
    like = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), abstract(cfg))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == like
    assert check_invariants(state, cfg) == dict.fromkeys(check_invariants(state, cfg), True)
    assert bool(state.active.all()) and hosts_of(state)[0].host is state.pools[0].host


def test_weights_of_v41_are_counted_to_the_byte():
    shard = shard_of("tiny-v4.1", None, 2)
    assert sum(shard.weight_bytes().values()) == size_of(shard.share.shapes)
    # The one table of ids for n-grams is a group's, the rest is read once.
    assert size_of(shard.abstract_weights()) == size_of(shard.share.shapes)


@pytest.mark.parametrize(("config", "experts"), [(GLM_5_3, 32), (TINY, 4)])
def test_weights_are_counted_to_the_byte(config, experts):
    assert sum(weight_bytes(config, experts).values()) == size_of(abstract_weights(config, experts))


def test_heads_over_several_chips():
    """Of GLM-5.3, by hand: only what is of heads, of dense MLPs or of the vocabulary is divided."""
    whole, part = (weight_bytes(split(GLM_5_3, chips), 1) for chips in (1, 4))
    heads = 48 * (256 * (2048 + 4) + 512 * (192 + 4) + 256 * (512 + 4) + 256 * 6144)
    assert whole["attention weights"] - part["attention weights"] == 78 * heads
    divided = {"attention weights", "dense layers", "head", "embedding"}
    assert {stage for stage in whole if whole[stage] != part[stage]} == divided
    assert part["head"] == whole["head"] // 4
    with pytest.raises(UserError, match="3 chips do not divide the 64 of num_heads"):
        split(GLM_5_3, 3)


@pytest.mark.parametrize(
    ("draft", "model"),
    [("none", "tiny"), ("dflash2", "tiny"), ("dspark", "tiny"), ("dspark", "tiny-v4.1")],
)
def test_the_account_is_the_bytes_of_all_arrays(draft, model):
    setup = setup_of(draft, model)
    cell = dataclasses.replace(cell_of(Policy.ADAPTIVE), draft=draft)
    cfg = setup.config(cell)
    state = abstract(cfg)
    hosts = size_of([(pool.host, pool.host_keys) for pool in state.pools])
    arrays = size_of(setup.params) + size_of(state) - hosts
    if draft != "none":
        arrays += size_of(setup.draft_params.inner["draft"])
        arrays += size_of(jax.eval_shape(lambda: setup.drafter.init(cfg.requests)))
    counted = account(setup, cell)
    assert counted.device_bytes - counted.bytes["workspace"] == arrays
    assert counted.host_bytes == hosts


def test_hot_rows_and_requests_are_the_most_that_fit():
    setup = setup_of(model="glm-5.3", layers=None, context=100_000, room=400, requests=16, gpus=8)
    limit, held = 143e9, lambda cell: account(setup, cell).device_bytes
    cell = fitted(setup, cell_of(Policy.ADAPTIVE, requests=16), limit)
    assert cell.requests == 16
    assert held(cell) <= limit < held(dataclasses.replace(cell, hot_rows=cell.hot_rows + 256))
    whole = fitted(setup, cell_of(Policy.RESIDENT, requests=16), limit)
    assert 1 < whole.requests < 16
    assert limit < held(dataclasses.replace(whole, requests=whole.requests + 1))
    with pytest.raises(UserError, match=r"needs 11\d.\d GB of device memory for one request"):
        fitted(setup, cell_of(Policy.RESIDENT), 100e9)


def test_requests_without_host_pages_of_their_own_share_them():
    setup = setup_of(host_pages=2 * 22)  # capacity 352: of two requests, for three
    cfg = setup.config(cell_of(Policy.ADAPTIVE))
    made = patterns(cfg)
    state = warm_state(cfg, made, host_pools(cfg, made), CONTEXT)
    pages = np.asarray(state.host_page_of)
    assert cfg.host_page_count == 44
    assert (pages[2] == pages[0]).all() and not set(pages[1]) & set(pages[0])
    broken = [name for name, holds in check_invariants(state, cfg).items() if not holds]
    assert broken == ["shared_is_complete"]  # the last page of both still grows


def test_host_memory_has_whole_requests():
    """100,000 positions of GLM-5.3: arrays of 4, 1.2 and 0.4 GiB that regions do not fill."""
    share = shard_of("glm-5.3", None, 8)
    held = lambda gigabytes: host_requests(share, 100_000, 16, gigabytes * 2**30)
    assert [held(1), held(6), held(90), held(97), held(1000)] == [0, 1, 15, 16, 16]


GIB = 2**30


@pytest.mark.parametrize(
    ("arrays", "least"),
    [
        ([1], 1),
        ([3], 3),  # its region would be 4, and is what is left
        ([3, 3], 7),  # 4 and 3
        ([3, 3, 2], 9),  # the second region is 5, and 2 behind
        ([3, 3, 2, 3], 12),  # 4, 8: all of it
        ([1, 1, 1, 1], 4),  # 1, 2 of two, 1
        ([3, 1, 3], 7),  # the small one behind the first
    ],
)
def test_arrays_fall_into_regions_that_double(arrays, least):
    sizes = [GIB * each for each in arrays]
    assert placed(sizes, GIB * least)
    assert not placed(sizes, GIB * least - 1)


@pytest.mark.parametrize("mean", [1.5, 3.97, 5.29, 7.5])
def test_a_profile_with_another_mean(mean):
    survival = survival_for(mean, PUBLISHED_SURVIVAL)
    assert tokens_per_step(survival) == pytest.approx(mean)
    assert list(survival) == sorted(survival, reverse=True)
    assert 0 < survival[-1] <= survival[0] < 1


def test_a_mean_that_no_profile_has_is_refused():
    with pytest.raises(UserError, match="a mean of 9 tokens per step is not between 1 and 8"):
        survival_for(9.0, PUBLISHED_SURVIVAL)


def figures(requests, tokens_per_s, tpot_ms):
    kept = dict.fromkeys(KEPT, 1.0) | {"tokens_per_s": tokens_per_s, "tpot_ms": tpot_ms}
    return kept | {"requests": requests, "expected": {"measured_over_expected": 1.0}}


SWEEP = [
    row_of(4, "fixed", figures(4, 100.0, 40.0)),
    row_of(16, "fixed", figures(16, 300.0, 53.0)),
    row_of(64, "fixed", figures(40, 290.0, 138.0)),
    row_of(4, "adaptive", figures(4, 110.0, 36.0)),
    row_of(16, "adaptive", figures(16, 400.0, 40.0)),
    row_of(64, "adaptive", figures(60, 1200.0, 50.0)),
    row_of(4, "resident", figures(4, 112.0, 35.0)),
]


SPEEDS = {"fixed": 10.0, "resident_dspark": 40.0, "adaptive_dspark": 80.0}


def test_shares_of_floors():
    floors = {"experts": 9.0, "attend": 1.0, "retrieve": 4.0, "head": 2.0, "index": 1.0}
    stages = {"experts": 10.0, "attend": 2.0, "retrieve and attend": 5.0, "retrieve": 1.0}
    together = reached(floors, {**stages, "head": 0.1})
    assert together == {"experts": 0.9, "retrieve and attend": 0.5}  # the head's are elsewhere
    apart = reached(floors, {"attend": 2.0, "retrieve": 5.0})
    assert apart == {"attend": 0.5, "retrieve": 0.8}


def test_stages_of_kernels():
    scopes = {"gemm_1": "jit(group_3)/experts/dot", "cublas_2": "a/verify/dot"}
    programs = {"group_3": Traced(scopes)}
    events = [
        Event(Kernel("group_3", "gemm_1", ""), 0.0, 1.0),
        Event(Kernel("end", "gemm_1", ""), 1.0, 2.0),  # another program's
        Event(Kernel("group_3", "nvjet", "cublas_2"), 3.0, 4.0),
        Event(Kernel("", "retrieve__1", ""), 7.0, 3.0),
        Event(Kernel("", "retrieve__1", ""), 10.0, 5.0),
    ]
    assert by_stage(events, programs) == {
        "experts": 1.0,
        "other": 2.0,
        "head": 4.0,
        "retrieve": 8.0,
    }


def test_a_timeline_has_whole_runs():
    """Of a run: two kernels of one stage side by side, a gap, one of another; then other work."""
    scopes = {"a": "experts/dot", "b": "experts/dot", "c": "verify/dot"}
    programs = {"group_3": Traced(scopes)}
    kernel = lambda name: Kernel("group_3", name, "")
    of_run = [("a", 0, 10), ("b", 11, 20), ("c", 50, 5)]
    events = [
        Event(kernel(name), 1e-6 * (100 * run + begin), 1e-6 * length)
        for run in range(4)
        for name, begin, length in of_run
    ]
    events.insert(4, Event(Kernel("end", "x", ""), 80e-6, 1e-6))
    run = [("experts", 0.0, 31.0), ("head", 50.0, 5.0)]
    later = [(stage, 100 + begin, length) for stage, begin, length in run]
    assert timeline(sorted(events, key=lambda event: event.begin), programs) == run + later
    assert timeline(events[:3], programs) == []
    assert timeline([], {}) == []


def test_the_most_within_a_bound():
    asked, fixed, adaptive, _ = bounded(SWEEP, [41.0])
    assert asked["bound"] == "41 ms"
    assert asked["cells"]["fixed"] == {"requests": 4, "tokens_per_s": 100.0}
    assert asked["cells"]["adaptive"] == {"requests": 16, "tokens_per_s": 400.0}
    assert (fixed["bound"], fixed["tpot_ms"]) == ("fixed at its best", 53.0)
    assert fixed["cells"]["adaptive"] == {"requests": 60, "tokens_per_s": 1200.0}
    assert adaptive["cells"]["fixed"] == {"requests": 4, "tokens_per_s": 100.0}
    assert not bounded(SWEEP, [1.0])[0]["cells"]


def test_cells_are_compared_without_a_draft_and_with_the_same():
    cells = {name: {"tokens_per_s": speed} for name, speed in SPEEDS.items()}
    found = ratios(cells)
    assert found["adaptive_dspark/resident_dspark"] == 2.0
    assert found["adaptive_dspark/fixed"] == 8.0
    assert "fixed/resident_dspark" not in found


def test_low_load_is_compared_with_resident():
    assert compared_with_resident(SWEEP) == {"adaptive at 4": pytest.approx(110 / 112)}


def test_pictures_of_a_result(tmp_path):
    pytest.importorskip("matplotlib")
    from bench.decode_plots import decode_gpu

    cell = {
        "stages_ms": {"experts": 20.0, "attend": 5.0, "plan": 0.1},
        "reached": {"experts": 0.6, "attend": 0.4},
        "step_ms": 27.0,
        "floor_ratio": 2.0,
    }
    path = tmp_path / "result.json"
    bars = [("experts", 0.0, 9.0), ("plan", 10.0, 1.0)]
    cells = {"fixed": cell, "adaptive_dflash2": cell | {"stages_ms": {}, "reached": {}}}
    cells["fixed"]["timeline_us"] = bars
    path.write_text(json.dumps({"sweep": SWEEP, "cells": cells}))
    decode_gpu(path)
    assert {file.name for file in tmp_path.glob("*.png")} == {
        f"result_{name}.png" for name in ("sweep", "stages", "floor", "timeline")
    }


def test_acceptance_has_the_profile():
    key, survival = jax.random.key(0), jnp.asarray(PUBLISHED_SURVIVAL, jnp.float32)
    draw = jax.jit(jax.vmap(lambda at: accepted_proposals(key, survival, at)))
    counts = np.asarray(draw(jnp.arange(20_000, dtype=jnp.int32).reshape(-1, 8)))
    seen = [(counts >= place).mean() for place in range(1, 8)]
    np.testing.assert_allclose(seen, PUBLISHED_SURVIVAL, atol=0.012)
    assert 1 + counts.mean() == pytest.approx(tokens_per_step(PUBLISHED_SURVIVAL), abs=0.06)


def test_expert_loads_are_those_of_all_gpus():
    positions = jnp.arange(4096, dtype=jnp.int32).reshape(8, 512) + 100_000
    loads = np.stack(
        [
            np.bincount(np.asarray(uniform_picks(positions, layer, 8, 32)).ravel(), minlength=32)
            for layer in (3, 4)
        ]
    )
    mean = 4096 * 8 / 32
    assert loads.sum() == 2 * 32 * mean
    assert loads.std() == pytest.approx(math.sqrt(mean), rel=0.4)  # binomial
    assert loads.max() < expert_room(4096 * 8, 32)


@pytest.mark.parametrize(
    ("tokens", "room"), [(1, 16), (16, 16), (64, 48), (128, 64), (256, 112), (392, 160)]
)
def test_room_of_experts(tokens, room):
    """16, 64, 128 and 256 tokens: 4, 16, 32 and 64 picks for an expert on average."""
    assert expert_room(8 * tokens, 32) == room


def test_experts_sum_what_tokens_picked():
    setup = setup_of()
    moe = setup.params.weights.layers[-1].mlp
    experts = random_like(moe.experts, 0)
    x = random_like(jax.ShapeDtypeStruct((5, TINY.hidden_size), jnp.bfloat16), 1)
    expert = jnp.asarray([[0, 1], [3, 3], [2, 0], [1, 1], [3, 2]], jnp.int32)
    weight = jnp.asarray([[0.5, 1.0], [0.25, 2.0], [1.0, 1.0], [0.5, 0.5], [1.0, 0.1]], jnp.float32)
    run = lambda rows, _: gated(experts, rows, jnp.bfloat16, sums_of_each)
    found = run_experts(run, 4, rounded(x), expert, weight)
    exact = lambda matrix: np.asarray(
        matrix.numbers.astype(jnp.float32) * matrix.scale[..., None], np.float64
    )
    gate_up, down, rows = exact(experts.gate_up), exact(experts.down), read(x)
    wanted = np.zeros(rows.shape)
    for token in range(5):
        for number, factor in zip(expert[token].tolist(), weight[token].tolist(), strict=True):
            gate, up = np.split(gate_up[number] @ rows[token], 2)
            inner = read(jnp.asarray(gate / (1 + np.exp(-gate)) * up, jnp.bfloat16))
            wanted[token] += factor * (down[number] @ inner)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=0.05, atol=0.02)


def read(rows):
    """What rows stand for after they are rounded."""
    small = rounded(rows)
    return np.asarray(small.numbers, np.float64) * np.asarray(small.scales, np.float64)[..., None]


def test_records_of_several_positions_come_with_the_last_of_them():
    """A query selects records that are complete at its position, the one it completes included."""
    chosen = selections(2, k=16, history=CONTEXT, rows=9, rate=2)
    assert (np.diff(chosen, axis=-1) > 0).all()
    visible = (CONTEXT + np.arange(9) + 1) // 2
    assert (chosen < visible[:, None]).all()
    assert (chosen[:, 1::2, -1] == visible[1::2] - 1).all()


def test_selections_are_a_texts_and_ascend():
    chosen = selections(2, k=16, history=CONTEXT, rows=9)
    assert chosen.shape == (2, 9, 16)
    assert (np.diff(chosen, axis=-1) > 0).all()
    assert (chosen[:, :, -1] == CONTEXT + np.arange(9)).all()
    each = followed(selections=7, requests=5, traces=8)
    assert all(len(set(row)) == 5 for row in each.tolist())


def test_a_step_takes_as_long_as_its_slower_side():
    setup = setup_of(model="glm-5.3", layers=None, requests=16, gpus=8, context=100_000, room=400)
    cfg = setup.config(cell_of(Policy.FIXED, requests=16, hot_rows=4096))
    load = StepLoad(requests=16, queries=1, context=100_000, attended=2048.0, fetched=290.0)
    work = step_work(setup.model.config, 32, cfg, load)
    fast = step_seconds(work, Rates(hbm=4.3e12, link=55e9, flops=790e12))
    assert 0.026 < fast < 0.034  # 90.6 GB of experts alone take 21 ms
    slow = step_seconds(work, Rates(hbm=4.3e12, link=1e9, flops=790e12))
    assert slow == pytest.approx(16 * 290 * (2 * 768 + 19 * 2688) / 1e9)


def followable(setup, rows, traces=4):
    """Traces for pools of every rate, one rate after the other."""
    k, rates = setup.model.config.index_top_k, sorted(set(setup.model.geometry.rates or (1,)))
    make = lambda rate: selections(traces, k=k, history=CONTEXT, rows=rows, rate=rate)
    return np.concatenate([make(rate) for rate in rates])


@pytest.mark.slow  # the shapes of the whole model take a while
def test_a_step_of_v41_is_bound_by_what_each_request_takes():
    """From 64 requests of 500K on, twice as many take twice as long: none waits for weights."""
    seconds = {}
    for requests in (16, 64, 128):
        sizes = {"context": 500_000, "room": 320, "requests": requests, "gpus": 8}
        setup = setup_of("dspark", "deepseek-v4.1-flash", None, **sizes)
        cfg = setup.config(cell_of(Policy.RESIDENT, requests=requests))
        load = StepLoad(requests=requests, queries=6, context=500_000, attended=1024.0, fetched=0.0)
        work = setup.model.step_work(cfg, load, 1)
        assert work["experts"].hbm_bytes == 40 * 48 * 3 * 5120 * 2304 * (1 / 2 + 1 / 32)
        seconds[requests] = step_seconds(work, H200.rates)
    assert seconds[128] == pytest.approx(2 * seconds[64], rel=0.01)
    assert seconds[64] < 2.1 * seconds[16]


def begun(setup, cfg, replay):
    """What decodes from CONTEXT on."""
    made = patterns(cfg)
    state = warm_state(cfg, made, host_pools(cfg, made), CONTEXT)
    return decode_state(cfg, setup.drafter, state, replay.text, CONTEXT)


@pytest.mark.slow  # compiles two decode steps
@pytest.mark.parametrize(
    ("model", "policy", "draft", "programs"),
    [
        ("tiny", "fixed", "none", 3),
        ("tiny", "adaptive", "dflash2", 3),
        ("tiny-v4.1", "adaptive", "dspark", 2),
    ],
)
def test_a_step_in_pieces_is_the_step(model, policy, draft, programs):
    setup = setup_of(draft, model, layers=None)
    exact = dataclasses.replace(setup.model, dtype="float32")
    inner, _ = exact.draft(draft, setup.params.weights)
    drafter = replaying(inner, exact.vocabulary)
    setup = dataclasses.replace(setup, model=exact, drafter=drafter)
    hot_rows = 2 * setup.model.config.index_top_k
    cell = dataclasses.replace(cell_of(Policy(policy), hot_rows=hot_rows), draft=draft)
    cfg = setup.config(cell)
    speculation = Speculation(setup.drafter)
    pieces = segments(setup.model, speculation, cfg)
    assert len(pieces.groups) == programs
    shapes = setup.params.replay
    chosen = followable(setup, rows=shapes.selections.shape[1])
    text = np.arange(3 * cfg.queries, dtype=np.int32).reshape(3, -1) + 7
    replay = replay_arrays(shapes, chosen, paths(setup, len(chosen)), text, CONTEXT)
    weights = setup.model.random_weights()
    params = ShardParams(weights=weights, replay=replay)
    draft_params = draft_of(setup, weights, replay, PUBLISHED_SURVIVAL)[1]
    form = jax.tree.structure(params)
    whole = jax.jit(partial(packed_steps, 1, setup.model, speculation, cfg, form))
    ends = []
    for step, operand in ((whole, jax.tree.leaves(params)), (pieces, params)):
        state, outputs = begun(setup, cfg, replay), []
        operands = operand, draft_params, no_profile(cfg)
        between = [] if step is whole else [zeros_like(pieces.between(*operands, state))]
        for _ in range(3):
            state, place, *between = step(*operands, state, places(cfg, 1)[0], *between)
            outputs.append(unpacked(place))
        ends.append((state, outputs))
    one, other = (jax.tree.leaves_with_path(end) for end in ends)
    for (path, left), (_, right) in zip(one, other, strict=True):
        names = [getattr(key, "name", None) for key in path]
        computed = names[-1] in ("host", "host_keys", "slots", "index_keys", "keys", "values")
        computed |= "kept" in names and left.shape[-1] > 1  # not token ids
        if computed:
            left, right = (np.asarray(leaf).view(np.float32) for leaf in (left, right))
        elif names[-1] == "survival":  # of what a draft says of itself
            computed = True
        elif jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
            left, right = (jax.random.key_data(leaf) for leaf in (left, right))
        near = np.testing.assert_allclose if computed else np.testing.assert_array_equal
        # What is computed may be rounded elsewhere where programs end.
        near(
            left, right, err_msg=jax.tree_util.keystr(path), **({"atol": 1e-4} if computed else {})
        )


@pytest.mark.slow  # compiles a decode step
def test_a_cell_fetches_what_the_simulator_says():
    setup = setup_of(layers=2)
    cell = cell_of(Policy.FIXED)
    cfg = setup.config(cell)
    chosen = selections(4, k=TINY.index_top_k, history=CONTEXT, rows=24)
    ways = paths(setup, 4)
    text = np.arange(3, dtype=np.int32)[:, None] + 7
    replay = replay_arrays(setup.params.replay, chosen, ways, text, CONTEXT)
    params = ShardParams(weights=setup.model.random_weights(), replay=replay)
    state = begun(setup, cfg, replay)
    step = segments(setup.model, Speculation(setup.drafter), cfg)
    place, seen, operands = places(cfg, 1)[0], [], (params, (), no_profile(cfg))
    between, where = zeros_like(step.between(*operands, state)), []
    for _ in range(12):
        state, place, between = step(*operands, state, place, between)
        where.append(addresses((state, between)))
        output = unpacked(place)
        assert (output.tokens[0] == text).all() and (output.count == 1).all()
        seen.append(output.records.fetched[0])
    windows = chosen[:, :, None]
    advance = np.ones(windows.shape[:2], np.int32)
    play = Script(windows, history=np.full(4, CONTEXT, np.int32), advance=advance)
    simulated = Simulator(cfg, play)
    for row in range(3):
        simulated.join(ways[:, row].tolist())
    np.testing.assert_array_equal(np.stack(seen), simulated.run(12).fetched)
    assert check_invariants(state.hierarchy, cfg)["hot_equals_host"]
    # What kernels read and write stays where it is, so their graphs need no update.
    assert len(set(where)) == 1


def addresses(tree):
    """Of all arrays in the memory of a device that change."""
    leaves = jax.tree.leaves(tree)
    kinds = (host_sharding().memory_kind,) if jax.__version_info__ >= (0, 11) else ()
    return tuple(
        leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.sharding.memory_kind not in kinds
    )
