"""The schedule: optimal where it can be, and never by looking at what it decides about."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.speculation import schedule
from dhisparse_jax.speculation.schedule import (
    UNION_GROWTH,
    Profile,
    Rule,
    best,
    early_stop,
    init_load,
    join_load,
    live_queries,
    observe,
    throughput,
)

R, N = 3, 4


def profile(seconds, byte_seconds=0.0):
    return Profile(
        step_seconds=jnp.asarray(seconds, jnp.float32), byte_seconds=jnp.float32(byte_seconds)
    )


def flat(requests=R, length=N, byte_seconds=0.0):
    return profile(np.ones(requests * (length + 1) + 1), byte_seconds)


def rising(slope, requests=R, length=N):
    return profile(1.0 + slope * np.arange(requests * (length + 1) + 1))


def stairs():
    """Every third query costs, as many compiled sizes do: the throughput has several peaks."""
    return profile(1.0 + 0.3 * (np.arange(R * (N + 1) + 1) // 3))


def full(requests=R, length=N):
    return jnp.full(requests, length + 1, jnp.int32)


def chosen(rule, confidence, load, prof, room):
    return live_queries(rule, jnp.asarray(confidence, jnp.float32), load, prof, room).tolist()


# The paper's counterexample: 1 request, N = 2, SPS = (1, .5, .45), a_1 = .8, p = (.7, .3),
# q = (.5, .5). The second confidence depends on the first token: a retrospective choice leaks.

P, Q = np.array([0.7, 0.3]), np.array([0.5, 0.5])
TABLE = profile([1.0, 1.0, 1 / 0.5, 1 / 0.45])
CONFIDENCE = ([0.8, 1.0], [0.8, 0.0])  # after token 0, after token 1


def emitted(rule, load):
    """Distribution of the first emitted token, over the draft's two tokens."""
    result = np.zeros(2)
    for token, mass in enumerate(Q):
        (live,) = chosen(rule, [CONFIDENCE[token]], load, TABLE, full(1, 2))
        if live < 2:  # nothing proposed: plain decoding
            result += mass * P
            continue
        stands = min(1.0, P[token] / Q[token])
        rest = np.maximum(P - Q, 0.0)
        result[token] += mass * stands
        result += mass * (1.0 - stands) * rest / rest.sum()
    return result


def test_counterexample_early_stop_is_exact():
    np.testing.assert_allclose(emitted(Rule.EARLY_STOP, init_load(1, 2)), P, atol=1e-6)


@pytest.mark.parametrize("past", [[0.8, 0.8], [0.8, 0.1], [1.0, 1.0]])
def test_counterexample_stale_budget_is_exact(past):
    load = dataclasses.replace(init_load(1, 2), survival=jnp.asarray([[past, [0.5, 0.5]]]))
    np.testing.assert_allclose(emitted(Rule.STALE, load), P, atol=1e-6)


@pytest.mark.parametrize("acceptance", [[0.8, 1.0], [0.8, 0.0]])
def test_counterexample_history_is_exact(acceptance):
    load = dataclasses.replace(init_load(1, 2), acceptance=jnp.asarray([acceptance]))
    np.testing.assert_allclose(emitted(Rule.HISTORY, load), P, atol=1e-6)


def test_counterexample_catches_a_retrospective_argmax(monkeypatch):
    """The mutated rule picks the best length of this very block, and emits token 0 with .85."""
    monkeypatch.setattr(schedule, "early_stop", best)
    np.testing.assert_allclose(emitted(Rule.EARLY_STOP, init_load(1, 2)), [0.85, 0.15], atol=1e-6)


# Optimality


def brute_force(survival, prof, query_bytes, room):
    """The best rate over all combinations of lengths."""
    table, byte = np.asarray(prof.step_seconds, np.float64), float(prof.byte_seconds)
    rates = {}
    for lengths in itertools.product(*(range(max(int(r), 1)) for r in room)):
        live = [n + 1 if r > 0 else 0 for n, r in zip(lengths, room, strict=True)]
        tokens = sum(survival[i, :n].sum() for i, n in enumerate(lengths)) + (room > 0).sum()
        fetch = sum(b * q**UNION_GROWTH for b, q in zip(query_bytes, live, strict=True))
        rates[tuple(live)] = tokens / (table[sum(live)] + byte * fetch)
    return rates


@pytest.mark.parametrize("seed", range(6))
def test_flat_fetches_give_the_best_lengths(seed):
    """With a straight cost table and no fetches the order by survival is optimal."""
    rng = np.random.default_rng(seed)
    acceptance = rng.uniform(0.2, 1.0, (R, N)).astype(np.float32)
    load = dataclasses.replace(init_load(R, N), acceptance=jnp.asarray(acceptance))
    room = rng.integers(0, N + 2, R)
    prof = rising(0.02 + 0.1 * rng.uniform())
    live = chosen(Rule.HISTORY, np.ones((R, N)), load, prof, jnp.asarray(room, jnp.int32))
    rates = brute_force(np.cumprod(acceptance, axis=1), prof, np.zeros(R), room)
    assert rates[tuple(live)] == pytest.approx(max(rates.values()), rel=1e-5)
    assert all(n <= r for n, r in zip(live, room, strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_fetches_are_weighed(seed):
    """Different fetches per request: within 3 % of the best combination of lengths."""
    rng = np.random.default_rng(seed)
    acceptance = rng.uniform(0.3, 1.0, (R, N)).astype(np.float32)
    bytes_ = (10 ** rng.uniform(-2, 1, R)).astype(np.float32)
    load = dataclasses.replace(
        init_load(R, N), acceptance=jnp.asarray(acceptance), query_bytes=jnp.asarray(bytes_)
    )
    prof = flat(byte_seconds=1.0)
    live = chosen(Rule.HISTORY, np.ones((R, N)), load, prof, full())
    rates = brute_force(np.cumprod(acceptance, axis=1), prof, bytes_, np.full(R, N + 1))
    assert rates[tuple(live)] >= 0.97 * max(rates.values())


def test_without_any_cost_everything_is_verified():
    """A flat table and no fetches: no proposal costs anything."""
    for rule in Rule:
        live = chosen(rule, np.full((R, N), 0.5), init_load(R, N), flat(), full())
        assert live == [N + 1] * R


def test_a_request_that_misses_much_verifies_less():
    load = dataclasses.replace(
        init_load(2, N),
        acceptance=jnp.full((2, N), 0.7),
        query_bytes=jnp.asarray([0.01, 20.0]),
    )
    live = chosen(Rule.HISTORY, np.ones((2, N)), load, flat(2, byte_seconds=1.0), full(2))
    assert live[0] == N + 1
    assert live[1] < N


def test_slower_link_verifies_less():
    load = dataclasses.replace(
        init_load(R, N), acceptance=jnp.full((R, N), 0.6), query_bytes=jnp.ones(R)
    )
    total = [
        sum(chosen(Rule.HISTORY, np.ones((R, N)), load, flat(byte_seconds=b), full()))
        for b in (0.0, 0.5, 2.0, 100.0)
    ]
    assert total == sorted(total, reverse=True)
    assert (total[0], total[-1] < total[0]) == (R * (N + 1), True)


def test_requests_that_take_no_part():
    room = jnp.asarray([0, 1, N + 1], jnp.int32)
    for rule in Rule:
        assert chosen(rule, np.full((R, N), 0.9), init_load(R, N), flat(), room) == [0, 1, N + 1]
        none = chosen(rule, np.full((R, N), 0.9), init_load(R, N), flat(), room * 0)
        assert none == [0] * R


# What a decision may depend on


def leaks(rule):
    """Whether a later confidence ever decides about an earlier proposal; and the lengths seen."""
    rng = np.random.default_rng(4)
    load = dataclasses.replace(
        init_load(R, N), survival=jnp.asarray(rng.uniform(0.2, 1, (R, 2, N)), jnp.float32)
    )
    decide = jax.jit(lambda c: live_queries(rule, c, load, stairs(), full()))
    leak, lengths = False, set()
    for _ in range(40):
        confidence = rng.uniform(0.2, 1.0, (R, N)).astype(np.float32)
        live = np.asarray(decide(jnp.asarray(confidence)))
        lengths.add(tuple(live.tolist()))
        for k in range(N):
            other = confidence.copy()
            # Confidence k + 1 is the first that may depend on proposal k.
            other[0, k + 1 :] = rng.uniform(0.0, 1.0, N - k - 1)
            again = np.asarray(decide(jnp.asarray(other)))
            leak |= bool((live[0] >= k + 2) != (again[0] >= k + 2))
    return leak, lengths


@pytest.mark.parametrize("rule", [Rule.EARLY_STOP, Rule.STALE, Rule.HISTORY])
def test_later_confidences_never_decide_about_earlier_proposals(rule):
    leak, lengths = leaks(rule)
    assert not leak
    assert rule is Rule.HISTORY or len(lengths) >= 3


def test_a_retrospective_argmax_leaks(monkeypatch):
    monkeypatch.setattr(schedule, "early_stop", best)
    assert leaks(Rule.EARLY_STOP)[0]


def test_ties_go_to_the_earlier_proposal():
    """Saturated confidences tie exactly; what is admitted is still a prefix of every request."""
    load = dataclasses.replace(
        init_load(R, N), survival=jnp.tile(jnp.asarray([0.9, 0.5, 0.2, 0.1]), (R, 2, 1))
    )
    live = chosen(Rule.STALE, np.ones((R, N)), load, rising(0.3), full())
    assert live == sorted(live, reverse=True)
    assert len(set(live)) > 1


def test_throughput_by_hand():
    """1 request: 1 token in 1 s, then .8 and .4 more for half a second each."""
    load = init_load(1, 2)
    prof = profile([0.5, 1.0, 1.5, 2.0])
    place, rate = throughput(jnp.asarray([[0.8, 0.4]]), load, prof, full(1, 2))
    np.testing.assert_array_equal(place, [[1, 2]])
    np.testing.assert_allclose(rate, [1.0, 1.8 / 1.5, 2.2 / 2.0], rtol=1e-6)
    assert (int(best(rate)), int(early_stop(rate))) == (1, 1)
    _, short = throughput(jnp.asarray([[0.8, 0.4]]), load, prof, jnp.asarray([2], jnp.int32))
    assert short[2] == -np.inf


# The load


def step(load, confidence, live, count, bytes_):
    return observe(
        load,
        jnp.asarray(confidence, jnp.float32),
        jnp.asarray(live, jnp.int32),
        jnp.asarray(count, jnp.int32),
        jnp.asarray(bytes_, jnp.float32),
    )


def test_averages_follow_what_was_observed():
    load = init_load(1, 3)
    for _ in range(200):  # two of three proposals verified, the first accepted
        load = step(load, [[0.5, 0.5, 0.5]], [3], [2], [8.0])
    np.testing.assert_allclose(load.acceptance[0], [1.0, 0.0, 1.0], atol=1e-6)
    np.testing.assert_allclose(load.query_bytes, 8.0 / 3**UNION_GROWTH, rtol=1e-5)
    np.testing.assert_allclose(load.survival[0], [[0.5, 0.25, 0.125]] * 2)


def test_what_is_not_verified_is_tried_again():
    load = dataclasses.replace(init_load(1, 3), acceptance=jnp.zeros((1, 3)))
    for _ in range(300):
        load = step(load, np.ones((1, 3)), [1], [1], [0.0])
    assert (np.asarray(load.acceptance) > 0.9).all()


def test_a_request_that_takes_no_part_keeps_its_load():
    load = step(init_load(2, 2), np.full((2, 2), 0.3), [3, 3], [1, 2], [5.0, 5.0])
    after = step(load, np.full((2, 2), 0.9), [0, 3], [0, 3], [0.0, 0.0])
    for old, new in zip(jax.tree.leaves(load), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old[0], new[0])
        assert (old[1] != new[1]).any()


def test_survivals_become_stale_after_two_steps():
    load = init_load(1, 2)
    for confidence in ([[0.9, 0.5]], [[0.4, 0.5]]):
        load = step(load, confidence, [3], [1], [0.0])
    np.testing.assert_allclose(load.survival[0, 0], [0.9, 0.45], rtol=1e-6)
    np.testing.assert_allclose(load.survival[0, 1], [0.4, 0.2], rtol=1e-6)


def test_a_new_request_starts_from_what_the_others_are_like():
    load = dataclasses.replace(
        init_load(3, 2),
        acceptance=jnp.asarray([[0.0, 0.2], [0.5, 0.5], [1.0, 0.2]]),
        query_bytes=jnp.asarray([0.0, 4.0, 8.0]),
        survival=jnp.zeros((3, 2, 2)),
    )
    joined = join_load(load, jnp.int32(1))
    np.testing.assert_allclose(joined.acceptance, [[0.0, 0.2], [0.5, 0.3], [1.0, 0.2]], rtol=1e-6)
    np.testing.assert_allclose(joined.query_bytes, [0.0, 4.0, 8.0])
    np.testing.assert_allclose(joined.survival[1], 1.0)
    np.testing.assert_allclose(joined.survival[2], 0.0)
