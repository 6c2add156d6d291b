"""The speculative step: one retrieval for all queries, and no trace of what was rejected."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.config import Geometry, HierarchyConfig, Policy, RowFormat
from dhisparse_jax.engine.memory import sizes
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy import layout, requests
from dhisparse_jax.hierarchy.admit import admit_prompt
from dhisparse_jax.hierarchy.group import open_group
from dhisparse_jax.hierarchy.select import IndexInputs
from dhisparse_jax.hierarchy.state import init
from dhisparse_jax.model import layers_of, places_of
from dhisparse_jax.speculation.ring import visible
from tests.support.dense import dense_features
from tests.support.host import host_rows
from tests.support.serving import CONTEXT, POLICIES, drafted, engine, model, request, run
from tests.support.toy_draft import toy_draft, with_errs

LENGTH, WINDOW = 3, 10


@cache
def plain(prompt_length, new):
    asked = request(prompt_length, new)
    return [*asked.prompt, *run(engine("resident", 1), [asked]).tokens[0]]


@cache
def only_engine():
    """An engine whose draft knows the texts of this module."""
    texts = [plain(*sizes_of) for sizes_of in CASES]
    return drafted(*POLICIES["fixed"], toy_draft(texts, length=LENGTH, window=WINDOW))


def served(errs):
    return with_errs(only_engine(), errs)


# Prompts shorter than the window, between it and what is kept of a prompt, and far longer.
CASES = [(4, 40), (15, 40), (47, 30), (70, 20)]


def states(errs, case):
    """Host copies of the states after every step of a text, by length; row 0 runs it."""
    engine_, seen = served(errs), {}

    def keep():
        state, draft = jax.device_get((engine_.state, engine_.draft_state))
        if state.active[0]:
            seen[int(state.length[0])] = (state, draft)

    result = run(engine_, [request(*case)], after_step=keep)
    assert [*request(*case).prompt, *result.tokens[0]] == plain(*case)
    return seen


def visible_parts(cfg, state, ring):
    """All that a later step may read of request 0, by name."""
    length, parts = int(state.length[0]), {}
    for pool in range(cfg.pools):
        parts[f"host {pool}"] = state.pools[pool].host[host_rows(cfg, state)[0, :length]]
        parts[f"keys {pool}"] = state.pools[pool].index_keys[0, :length]
        held = np.arange(max(0, length + cfg.queries - cfg.tail), length, dtype=np.int32)
        slot = layout.tail_slot(cfg, pool, jnp.zeros_like(held), jnp.asarray(held))
        parts[f"tail {pool}"] = state.hot[0].slots[np.asarray(slot)]
    query = jnp.asarray([[length]] * cfg.requests, jnp.int32)
    position, seen = jax.device_get(visible(ring, query, WINDOW))
    order = np.argsort(position[0])
    order = order[seen[0, 0][order]]
    parts["ring positions"] = position[0][order]
    parts["ring"] = ring.keys[0, 0, order]
    return parts


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_bytes_as_accepted_tokens_alone(case):
    """A draft that is sometimes right, against one that is never: a token at a time, same T."""
    alone, cfg = states(16, case), served(16).cfg
    prompt, new = case
    # The engine launches a step ahead, so the state after the first one is not seen.
    assert list(alone) == list(range(prompt + 2, prompt + new))
    for errs in (0, 5):
        together = states(errs, case)
        assert len(together) < len(alone)
        for length, state in together.items():
            wanted = visible_parts(cfg, *alone[length])
            found = visible_parts(cfg, *state)
            for name, part in wanted.items():
                np.testing.assert_array_equal(found[name], part, err_msg=f"{name} at {length}")


def test_comparison_sees_another_text():
    """The comparison can fail: another prompt of the same length, with other bytes."""
    (length, state), *_ = states(16, CASES[1]).items()
    other = run_other(length)
    wanted = visible_parts(served(16).cfg, *state)
    differing = {n for n, part in other.items() if not np.array_equal(part, wanted[n])}
    assert differing == set(wanted) - {"ring positions"}


def run_other(length):
    engine_, kept = served(16), {}

    def keep():
        state, draft = jax.device_get((engine_.state, engine_.draft_state))
        if state.active[0] and int(state.length[0]) == length:
            kept.update(visible_parts(engine_.cfg, state, draft))

    run(engine_, [request(CASES[1][0], 5, seed=77)], after_step=keep)
    return kept


@pytest.mark.parametrize("case", CASES, ids=str)
def test_drafter_sees_the_features_of_accepted_tokens_only(case):
    """What was collected chunk by chunk and step by step, against all features at once."""
    wanted = dense_features(*model(), plain(*case), served(5).drafter.taps)
    prompt, _ = case
    for length, (state, ring) in states(5, case).items():
        parts = visible_parts(served(5).cfg, state, ring)
        assert int(ring.next[0]) == length
        newest = np.arange(max(0, length - WINDOW + 1), length)
        np.testing.assert_array_equal(parts["ring positions"], newest)
        np.testing.assert_allclose(parts["ring"][:, 0], wanted[newest], rtol=1e-4, atol=1e-4)
    assert length > prompt


@pytest.mark.parametrize("prompt", [1, 16, 17, 95])
def test_drafter_without_a_window_gets_the_whole_prompt(prompt):
    draft = toy_draft(length=1, window=None, positions=CONTEXT)
    engine_ = drafted(*POLICIES["fixed"], draft)
    tokens = request(prompt, 1).prompt
    list(engine_.prefill(1, 0, tokens))
    wanted = dense_features(*model(), tokens, draft.drafter.taps)
    found = np.asarray(engine_.draft_state.keys)[1, 0, :prompt, 0]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert np.asarray(engine_.draft_state.next).tolist() == [0, prompt, 0]


def test_only_the_newest_features_of_a_prompt_are_kept():
    """A window of 10 in chunks of 16: two chunks, whatever the capacity."""
    assert only_engine().compiled.tap_rows == 32
    embed, tokens = only_engine().compiled.embed, jnp.zeros(96, jnp.int32)
    hidden = embed(only_engine().params, tokens, jnp.int32(0))
    assert hidden.taps.shape == (2, 32, 24)


def test_full_attention_needs_a_number_of_positions():
    with pytest.raises(UserError, match="attends to the whole history"):
        drafted(*POLICIES["fixed"], toy_draft(length=1, window=None))


def test_places_of_layers():
    geometry = model()[0].geometry  # groups of 1 and 2 layers
    assert places_of(geometry, 0, (2, 0)) == (0,)
    assert places_of(geometry, 1, (2, 0)) == (1,)
    assert places_of(geometry, 1, (2, 1)) == (0, 1)
    assert layers_of(geometry, 1, (0, 1)) == (1, 2)


# One retrieval for all queries

CAPACITY, QUERIES, K = 48, 3, 6
PROMPT = 30


def selecting(policy, hot_rows):
    """A hierarchy in which index keys are unit vectors, so that queries select what they name."""
    geometry = Geometry(
        row=RowFormat(width=4, value_width=4, dtype="float32"),
        layers_per_pool=(1,),
        top_k=K,
        index_width=CAPACITY,
        index_dtype="float32",
        scale=1.0,
    )
    cfg = HierarchyConfig(
        geometry=geometry,
        policy=Policy(policy),
        requests=2,
        capacity=CAPACITY,
        queries=QUERIES,
        hot_rows=hot_rows,
        tail=8,
    )
    state = init(cfg)
    for row in range(2):
        state = requests.join(state, cfg, jnp.int32(row), jnp.int32(PROMPT))
        records = jnp.arange(CAPACITY * 32, dtype=jnp.int32).reshape(CAPACITY, 32) + row
        keys = jnp.eye(CAPACITY)
        state = admit_prompt(state, cfg, 0, jnp.int32(row), records, keys)
    return cfg, state


def named(selections):
    """Index inputs whose queries select exactly these positions: [request][query][K]."""
    queries = np.zeros((2, QUERIES, 1, CAPACITY), np.float32)
    for row, of_row in enumerate(selections):
        for query, positions in enumerate(of_row):
            queries[row, query, 0, positions] = 1.0
    keys = np.eye(CAPACITY, dtype=np.float32)[PROMPT : PROMPT + QUERIES]
    return IndexInputs(
        queries=jnp.asarray(queries),
        weights=jnp.ones((2, QUERIES, 1)),
        keys=jnp.asarray(np.stack([keys] * 2)),
    )


OVERLAPPING = [
    # 12 distinct positions, of which the tail (from 25 on) holds 2; 0, 1 are in all three.
    [[0, 1, 2, 3, 4, 5], [0, 1, 4, 5, 6, 7], [0, 1, 8, 9, 28, 29]],
    # The same six three times: six records, not eighteen.
    [[3, 5, 7, 9, 11, 13]] * 3,
]


@pytest.mark.parametrize(("policy", "hot_rows"), [("fixed", 2), ("fixed", 20), ("adaptive", 16)])
def test_fetched_is_the_missing_union(policy, hot_rows):
    cfg, state = selecting(policy, hot_rows)
    before = np.asarray(state.pools[0].slot_of)
    live = jnp.full(2, QUERIES, jnp.int32)
    opened = jax.jit(partial(open_group, cfg=cfg, pool=0))(
        state, index=named(OVERLAPPING), live=live
    )
    counts = jax.device_get(opened.plan.counts)
    tail = range(PROMPT + QUERIES - cfg.tail, CAPACITY)
    for row, selections in enumerate(OVERLAPPING):
        union = set().union(*selections)
        resident = {p for p in union if before[row, p] >= 0}
        missing = union - resident - set(tail)
        assert (counts.selected[row], counts.fetched[row]) == (len(union), len(missing))
        fetched = np.asarray(opened.plan.fetch_position[row])
        assert sorted(fetched[fetched >= 0].tolist()) == sorted(missing)
    if hot_rows == 2:
        assert counts.fetched.tolist() == [10, 6]


@pytest.mark.parametrize("live", [0, 1, 2])
def test_queries_that_are_not_live_fetch_nothing(live):
    """The first request verifies fewer queries than the other; both attend over what is theirs."""
    cfg, state = selecting("fixed", 2)
    opened = jax.jit(partial(open_group, cfg=cfg, pool=0))(
        state, index=named(OVERLAPPING), live=jnp.asarray([live, QUERIES], jnp.int32)
    )
    union = set().union(set(), *OVERLAPPING[0][:live])
    assert int(opened.plan.counts.selected[0]) == len(union)
    assert int(opened.plan.counts.fetched[0]) == len(union)
    assert int(opened.plan.counts.fetched[1]) == 6
    location = np.asarray(opened.plan.location[0])
    assert ((location >= 0).sum(axis=1) == [K if q < live else 0 for q in range(QUERIES)]).all()


# Memory


def config(layers_per_pool, queries, hot_rows):
    geometry = Geometry(
        row=RowFormat(width=8, value_width=8, dtype="float32"),
        layers_per_pool=layers_per_pool,
        top_k=64,
        index_width=4,
        index_dtype="float32",
        scale=1.0,
    )
    return HierarchyConfig(
        geometry=geometry,
        policy=Policy.ADAPTIVE,
        requests=4,
        capacity=2048,
        queries=queries,
        hot_rows=hot_rows,
        tail=2 * queries,
    )


def test_staging_is_shared_by_all_groups():
    """What the floor cannot hold of T K records, per request; once for 2 groups and for 20."""
    record = 128
    for groups in (2, 20):
        cfg = config((1,) * groups, queries=8, hot_rows=128)
        assert sizes(cfg).staging_bytes == record * 4 * (8 * 64 - 128)
    assert sizes(config((1,) * 20, queries=8, hot_rows=512)).staging_bytes == 0


def test_device_memory_grows_with_the_draft_by_tail_and_ring_only():
    """Where the budget covers the working set: 2 tail records per group for every query more."""
    for groups in (2, 20):
        before = sizes(config((1,) * groups, queries=1, hot_rows=1024))
        for length in (1, 3, 7):
            drafter = toy_draft(length=length, window=WINDOW).drafter
            after = sizes(config((1,) * groups, length + 1, hot_rows=1024), drafter)
            tail = 128 * 4 * groups * 2 * length
            ring = 4 * ((WINDOW + length + 1) * 2 * drafter.width * 2 * 4 + 4)
            assert after.device_bytes - before.device_bytes == tail + ring
            assert after.host_bytes == before.host_bytes
