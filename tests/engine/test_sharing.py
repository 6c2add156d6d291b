"""Requests that start with the same tokens: the same tokens follow, from fewer pages and chunks."""

import dataclasses
import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.events import NewTokens, PrefillProgress, StepDone
from dhisparse_jax.engine.request import Request
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy.invariants import check_invariants
from dhisparse_jax.sampling import Sampling
from dhisparse_jax.speculation.ring import visible
from tests.support.dense import dense_features
from tests.support.host import host_rows
from tests.support.serving import (
    CHUNK,
    CONTEXT,
    POLICIES,
    config,
    drafted,
    engine,
    is_idle,
    model,
    prompt,
    run,
)
from tests.support.toy_draft import toy_draft

BASE = prompt(80, seed=50)
PAGE = 16
NAN_WORD = np.int32(-1)


def asked(shared, own, new, seed, **options):
    """A request whose first tokens are those of BASE."""
    tokens = (*BASE[:shared], *prompt(own, seed=seed))
    return Request(name=f"{shared}+{own}", prompt=tokens, max_new_tokens=new, **options)


# Prefixes around a page and a chunk; a prompt that is another one's beginning, and the same twice.
REQUESTS = [
    asked(60, 5, 20, seed=1),
    asked(47, 20, 9, seed=2),
    asked(48, 3, 30, seed=3),
    asked(49, 1, 12, seed=4, sampling=Sampling(temperature=0.8, seed=3)),
    asked(64, 0, 25, seed=5),
    asked(15, 30, 14, seed=6),
    asked(60, 5, 31, seed=1),
    asked(17, 40, 8, seed=7),
    asked(80, 0, 15, seed=8),
]


@cache
def alone(request, draw=0):
    """What a request gives that runs by itself with all history on the device."""
    served = engine("resident", 1)
    filler = Request(name="first", prompt=(1,), max_new_tokens=1)
    return run(served, [filler] * draw + [request]).tokens[draw]


def expected():
    return {number: alone(item, number) for number, item in enumerate(REQUESTS)}


def assert_sound(served):
    report = check_invariants(served.state, served.cfg)
    assert all(report.values()), report


def assert_baseline(served):
    """No request holds anything; without the texts that are left, nobody does."""
    assert is_idle(served)
    served.sharing.forget()
    pages = served.sharing.pages
    assert pages.free == pages.unused == served.cfg.host_page_count
    assert not pages.users.any()
    assert not pages.keepers.any()


@cache
def small(policy):
    """Host memory for little more than one request of the largest size."""
    return engine(*POLICIES[policy], host_pages=9)


def pieces(served, requests):
    """Pieces of prefill of each request, from a run."""
    totals = {}
    for event in served.run(requests):
        if isinstance(event, PrefillProgress):
            totals[event.request] = event.total
    return totals


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_of_requests_alone(policy):
    served = engine(*POLICIES[policy])
    found = run(served, REQUESTS, after_step=lambda: assert_sound(served))
    assert found.tokens == expected()
    assert_baseline(served)


@pytest.mark.parametrize(
    "policy",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in ("resident", "fixed")), "adaptive"],
)
def test_with_little_host_memory(policy):
    """9 pages are enough for two of these at most, so most of them wait, in order."""
    served = small(policy)
    found = run(served, REQUESTS, after_step=lambda: assert_sound(served))
    assert found.tokens == expected()
    assert_baseline(served)


@pytest.mark.parametrize("steps", [1, 2])
def test_with_a_draft(steps):
    greedy = {n: item for n, item in enumerate(REQUESTS) if item.sampling == Sampling()}
    texts = [[*item.prompt, *alone(item)] for item in greedy.values()]
    served = drafted(*POLICIES["adaptive"], toy_draft(texts, length=3), steps=steps)
    found = run(served, list(greedy.values()), after_step=lambda: assert_sound(served))
    assert list(found.tokens.values()) == [alone(item) for item in greedy.values()]
    assert found.acceptance.length > 1.5
    assert_baseline(served)


@pytest.mark.parametrize("window", [10, 40, None])
@pytest.mark.parametrize("shared", [17, 47, 60])
def test_a_draft_gets_the_features_of_shared_tokens(shared, window):
    """Of a prompt of 66 tokens; windows within the own part, beyond it, and over everything."""
    draft = toy_draft(length=1, window=window, positions=None if window else CONTEXT)
    served = drafted(*POLICIES["fixed"], draft)
    list(served.prefill(0, 0, BASE[:shared]))
    tokens = (*BASE[:shared], *prompt(66 - shared, seed=10))
    list(served.prefill(1, 1, tokens, served.sharing.enter(1, tokens, 90)))
    wanted = dense_features(*model(), tokens, draft.drafter.taps)
    ring = served.draft_state
    position, seen = jax.device_get(visible(ring, jnp.full((3, 1), 66, jnp.int32), window))
    slots = np.flatnonzero(seen[1, 0])
    assert sorted(position[1, slots]) == list(range(66 - min(window or 66, 66) + bool(window), 66))
    found = np.asarray(ring.keys)[1, 0, slots, 0]
    np.testing.assert_allclose(found, wanted[position[1, slots]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [10, pytest.param(40, marks=pytest.mark.slow)])
def test_a_draft_is_as_good_after_a_shared_prefix(window):
    """It accepts what it does without sharing: the toy's guesses are all wrong after a NaN.

    What is computed again leaves the shared records as they are, bit for bit.
    """
    texts = [[*item.prompt, *alone(item)] for item in REQUESTS[:3]]
    served = drafted(*POLICIES["adaptive"], toy_draft(texts, length=3, window=window))
    single = [run(served, [item]).acceptance for item in REQUESTS[:3]]
    before = None
    run(served, [REQUESTS[0]])
    for item, acceptance in zip(REQUESTS[1:3], single[1:], strict=True):
        before = before or records_of(served, 47)
        served.draft_state = jax.tree.map(nan_like, served.draft_state)
        events = list(served.run([item]))
        done = [event.acceptance for event in events if isinstance(event, StepDone)]
        assert sum(done[1:], done[0]) == acceptance
        total = next(event.total for event in events if isinstance(event, PrefillProgress))
        computed = min(len(item.prompt), len(item.prompt) - 47 + window)
        assert total == 2 * -(-computed // CHUNK)
        np.testing.assert_array_equal(records_of(served, 47), before)


def nan_like(leaf):
    floats = jnp.issubdtype(leaf.dtype, jnp.floating)
    return jax.device_put(jnp.full_like(leaf, jnp.nan if floats else 0), leaf.sharding)


def records_of(served, count):
    """Host records of the first positions of the oldest text, in both pools."""
    pages = served.sharing._texts[min(served.sharing._texts)]
    position = np.arange(count)
    rows = pages[position // PAGE] * PAGE + position % PAGE
    return [np.asarray(pool.host)[rows] for pool in served.state.pools]


def test_a_conversation_goes_on():
    """A prompt that is an earlier one, its answer, and more: nearly all of it is there."""
    served, text, known = engine(*POLICIES["fixed"]), BASE[:20], 0
    for turn in range(4):
        request = Request(name="turn", prompt=text, max_new_tokens=12)
        assert pieces(served, [request]) == {0: 2 * -(-(len(text) - known) // CHUNK)}
        known = len(text) + 12 - 1  # the last token of the answer was never read
        text = (*text, *alone(request), *prompt(3, seed=turn))
    assert_baseline(served)


def started(served, requests, events):
    """A run that is in the middle: `events` events after the last prompt was prefilled."""
    stream, tokens = served.run(requests), {n: [] for n in range(len(requests))}
    heard = lambda event: tokens[event.request].extend(event.tokens)
    while not all(tokens.values()):
        event = next(stream)
        if isinstance(event, NewTokens):
            heard(event)
    for event in itertools.islice(stream, events):
        if isinstance(event, NewTokens):
            heard(event)
    return stream, tokens


def test_fewer_pages_are_in_use():
    """Prompts of 65 and 67 tokens, 47 in common, 20 and 9 new ones: 6 and 5 pages, 2 of them one.

    The third page holds 15 common positions, and is copied.
    """
    served = engine(*POLICIES["fixed"])
    stream, _ = started(served, REQUESTS[:2], 4)
    users = served.sharing.pages.users
    assert (users > 0).sum() == 6 + 5 - 2
    assert (users == 2).sum() == 2
    table = np.asarray(served.state.host_page_of)
    np.testing.assert_array_equal(table[0, :2], table[1, :2])
    assert table[0, 2] != table[1, 2]
    stream.close()
    assert_baseline(served)


def test_only_the_own_part_is_prefilled():
    """With chunks of one token, the pieces are the tokens, once per pool."""
    served = Engine(*model(), config(*POLICIES["fixed"]), chunk=1)
    totals = pieces(served, REQUESTS[:3])
    assert totals == {0: 2 * 65, 1: 2 * 20, 2: 2 * 3}
    served.sharing.forget()
    assert pieces(served, REQUESTS[1:2]) == {0: 2 * 67}
    assert pieces(served, REQUESTS[1:2]) == {0: 2 * 1}
    assert_baseline(served)


def poisoned(served, rows):
    """All host records but those of the rows become NaN."""
    state, cfg = jax.device_get(served.state), served.cfg
    kept = np.unique(host_rows(cfg, state)[rows])
    pools = []
    for old, pool in zip(served.state.pools, state.pools, strict=True):
        host = np.full_like(pool.host, NAN_WORD)
        host[kept[kept >= 0]] = pool.host[kept[kept >= 0]]
        host = jax.device_put(host, old.host.sharding)
        pools.append(dataclasses.replace(old, host=host))
    served.state = dataclasses.replace(served.state, pools=tuple(pools))


@pytest.mark.parametrize("mine", [0, 1])
def test_a_copied_page_is_ones_own(mine):
    """Whatever happens to the pages of the other, the tokens stay the same."""
    served, requests = engine(*POLICIES["fixed"]), [*REQUESTS[:1], asked(47, 2, 25, seed=9)]
    stream, tokens = started(served, requests, 0)
    for event in stream:
        if isinstance(event, NewTokens):
            tokens[event.request].extend(event.tokens)
        if isinstance(event, StepDone):
            poisoned(served, [mine])
    assert tokens[mine] == alone(requests[mine], mine)
    assert tokens[1 - mine] != alone(requests[1 - mine], 1 - mine)  # so it does read the host
    assert_baseline(served)


def test_index_keys_come_from_host_memory():
    """The row that has them on the device may forget them, before and after; not so the host."""
    for leaf, same in (("index_keys", True), ("host_keys", False)):
        served = engine(*POLICIES["fixed"])
        run(served, [REQUESTS[0]])
        pools = [
            dataclasses.replace(pool, **{leaf: spoilt(getattr(pool, leaf))})
            for pool in served.state.pools
        ]
        served.state = dataclasses.replace(served.state, pools=tuple(pools))
        found = {0: []}
        for event in served.run([REQUESTS[4]]):
            if isinstance(event, NewTokens):
                found[0].extend(event.tokens)
        assert (found[0] == alone(REQUESTS[4])) == same


def spoilt(array):
    return jax.device_put(np.full(array.shape, 2**29, array.dtype), array.sharding)


@pytest.mark.parametrize(
    "policy",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in ("resident", "fixed")), "adaptive"],
)
def test_counts_come_back_after_every_schedule(policy):
    """Requests come in any order and are given up at any event, also in the middle of a prefill."""
    served, rng = small(policy), np.random.default_rng(len(policy))
    given_up = 0
    for _ in range(25):
        numbers = rng.integers(0, len(REQUESTS), rng.integers(1, 6))
        stream = served.run([REQUESTS[number] for number in numbers])
        tokens = [[] for _ in numbers]
        for event in itertools.islice(stream, int(rng.integers(1, 120))):
            if isinstance(event, NewTokens):
                tokens[event.request].extend(event.tokens)
        given_up += not is_idle(served)
        stream.close()
        assert is_idle(served)
        if rng.random() < 0.2:
            assert_baseline(served)
        for draw, (number, found) in enumerate(zip(numbers, tokens, strict=True)):
            if REQUESTS[number].sampling == Sampling():
                assert found == alone(REQUESTS[number])[: len(found)], draw
    assert given_up > 10
    assert_baseline(served)


def test_sharing_needs_no_other_programs():
    served = engine(*POLICIES["adaptive"])
    run(served, [REQUESTS[0]])
    traces = served.compiled.traces()
    run(served, REQUESTS)
    assert served.compiled.traces() == traces


def test_a_request_that_can_never_fit_is_refused():
    served = engine(*POLICIES["fixed"], host_pages=5)
    run(served, [asked(60, 0, 21, seed=0)])
    with pytest.raises(UserError, match=r"81 positions need 6 pages of 16 .* which has 5"):
        list(served.run([asked(60, 0, 22, seed=0)]))
    assert is_idle(served)


def test_host_memory_is_what_was_asked_for():
    few, all_ = small("fixed"), engine(*POLICIES["fixed"])
    assert few.sizes.host_bytes * all_.cfg.host_page_count == all_.sizes.host_bytes * 9
    assert all_.cfg.host_page_count == 3 * CONTEXT // PAGE
