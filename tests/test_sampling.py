"""Sampling: the right distribution, the same draws for the same seed, filters as in NumPy."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dhisparse_jax.errors import UserError
from dhisparse_jax.sampling import (
    LEAST_TEMPERATURE,
    Sampling,
    choose,
    greedy,
    sampler_row,
    target_logits,
)
from tests.support.dense import dense_logits
from tests.support.serving import engine, model, request, run

VOCABULARY = 12
LOGITS = np.random.default_rng(3).normal(scale=2.0, size=VOCABULARY).astype(np.float32)


def sampler(*samplings, number=0):
    """A sampler with the given rows, made as the engine makes it."""
    rows = [sampler_row(sampling, number) for sampling in samplings]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *rows)


@cache
def compiled():
    return jax.jit(choose)


def target(logits, temperature=1.0, top_k=0, top_p=1.0):
    """Probabilities in float64, by the definition: temperature, then top-k, then top-p."""
    scaled = logits.astype(np.float64) / (temperature or 1.0)
    order = sorted(range(len(logits)), key=lambda token: (-scaled[token], token))
    kept = order[: top_k or None]
    weights = {token: np.exp(scaled[token] - scaled[order[0]]) for token in kept}
    total, reached, smallest = sum(weights.values()), 0.0, []
    for token in kept:
        if not smallest or reached < top_p:
            smallest.append(token)
            reached += weights[token] / total
    result = np.zeros(len(logits))
    for token in smallest:
        result[token] = weights[token]
    return result / result.sum()


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 1.0, "top_k": VOCABULARY},
    {"temperature": 1.0, "top_k": 1000},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 2.0, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.8},
    {"temperature": 3.0, "top_k": 3, "top_p": 0.99},
]


def test_filters():
    rows = sampler(*(Sampling(**options) for options in FILTERS))
    logits = jnp.tile(jnp.asarray(LOGITS), (len(FILTERS), 1))
    found = np.asarray(jax.nn.softmax(jax.jit(target_logits)(logits, rows), axis=-1))
    wanted = np.stack([target(LOGITS, **options) for options in FILTERS])
    np.testing.assert_array_equal(found > 0, wanted > 0)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_filters_break_ties_by_token():
    logits = jnp.asarray([[1.0, 2.0, 2.0, 2.0, 0.0]])
    rows = sampler(Sampling(temperature=1.0, top_k=2))
    kept = np.asarray(target_logits(logits, rows) > -np.inf)
    assert kept.tolist() == [[False, True, True, False, False]]


def test_top_p_of_one_keeps_everything():
    """Also what is far too unlikely for a sum in float32 to notice."""
    logits = jnp.asarray([[20.0, 0.0, -5.0, 1.0, -30.0]])
    rows = sampler(Sampling(temperature=1.0, top_p=1.0))
    np.testing.assert_array_equal(target_logits(logits, rows), logits)


# Filters against a sort

RNG = np.random.default_rng(11)
WIDE = 67
LARGEST = np.finfo(np.float32).max
ROWS = {
    "random": RNG.normal(scale=3.0, size=WIDE),
    "peaked": RNG.normal(scale=40.0, size=WIDE),
    "few values": RNG.integers(-2, 3, WIDE),
    "all equal": np.full(WIDE, 1.5),
    "zeros of both signs": np.where(RNG.random(WIDE) < 0.5, 0.0, -0.0),
    "zeros among others": np.where(RNG.random(WIDE) < 0.7, -0.0, RNG.integers(-1, 2, WIDE)),
    "excluded": np.where(RNG.random(WIDE) < 0.5, -np.inf, RNG.integers(-3, 4, WIDE)),
    "one left": np.where(np.arange(WIDE) == 40, -7.0, -np.inf),
    "all excluded": np.full(WIDE, -np.inf),
    "extremes": RNG.choice([-LARGEST, -1e38, -1.0, -1e-37, 0.0, 1e-37, 1.0, 1e38, LARGEST], WIDE),
    "one bit apart": RNG.choice(np.float32([2.0, 2.0 + 2**-22, 2.0 - 2**-23]), WIDE),
}
COUNTS = (0, 1, 2, 5, WIDE - 1, WIDE, WIDE + 1, 2**31 - 1)
SHARES = (0.0, 1e-40, 1e-6, 0.1, 0.5, 0.9, 0.99, 1.0)
EVERY = [
    (name, temperature, top_k, top_p)
    for name in ROWS
    for temperature in (0.0, 0.25, 1.0, 2.0)
    for top_k in COUNTS
    for top_p in SHARES
]


def kept_by_a_sort(scaled, top_k, top_p):
    """The stable descending order, and the fewest and most tokens of it that may be kept.

    Two numbers, since sums are rounded: they differ where the mass before a token is almost top_p.
    """
    order = np.argsort(-scaled, kind="stable")
    ranked = scaled[order].astype(np.float64)[: top_k or None]
    weights = np.exp(ranked - ranked[0])
    before = (np.cumsum(weights) - weights) / weights.sum()
    bounds = [top_p * (1.0 - 1e-5), top_p * (1.0 + 1e-5)] if top_p < 1.0 else [np.inf, np.inf]
    return order, *(max(1, int((before < bound).sum())) for bound in bounds)


def filtered():
    """What `target_logits` makes of every case, and the scaled logits of it."""
    names, temperature, top_k, top_p = (np.array(column) for column in zip(*EVERY, strict=True))
    logits = np.stack([ROWS[name] for name in names]).astype(np.float32)
    rows = dataclasses.replace(
        greedy(len(EVERY)),
        temperature=jnp.asarray(temperature, jnp.float32),
        top_k=jnp.asarray(top_k, jnp.int32),
        top_p=jnp.asarray(top_p, jnp.float32),
    )
    with np.errstate(over="ignore"):
        scaled = logits / np.where(temperature > 0, temperature, 1).astype(np.float32)[:, None]
    return np.asarray(jax.jit(target_logits)(logits, rows)), scaled


def test_filters_keep_what_a_sort_would():
    unsure = 0
    for case, found, scaled in zip(EVERY, *filtered(), strict=True):
        if not (scaled < np.inf).all():  # the largest logits, divided by less than 1
            continue
        kept = found > -np.inf
        np.testing.assert_array_equal(found[kept], scaled[kept], err_msg=case)
        if (scaled == -np.inf).all():
            assert not kept.any()
            continue
        order, fewest, most = kept_by_a_sort(scaled, *case[2:])
        possible = int((scaled > -np.inf).sum())  # the excluded stay so, whether kept or not
        count = int(kept.sum())
        assert min(fewest, possible) <= count <= min(most, possible), case
        assert kept[order[:count]].all(), case  # a beginning of the order: ties to the lowest
        unsure += fewest < most
    assert unsure < len(EVERY) // 50


def test_a_share_of_equal_tokens_is_exact():
    """Of 64 with the same mass, half of it are 32, and a little more are 33."""
    shares = np.array([1, 16, 31, 32, 63], np.float32) / 64
    both = jnp.asarray(np.stack([shares, shares + np.float32(1e-6)]).reshape(-1))
    rows = dataclasses.replace(greedy(both.shape[0]), top_p=both)
    kept = np.asarray(target_logits(jnp.zeros((both.shape[0], 64)), rows) > -np.inf)
    assert kept.sum(axis=1).tolist() == [1, 16, 31, 32, 63, 2, 17, 32, 33, 64]
    assert (np.diff(kept.astype(int), axis=1) <= 0).all()


def draws(sampling, count=4000):
    """Draws for positions 0, 1, 2, ... of one request."""
    rows = jax.tree.map(lambda leaf: jnp.repeat(leaf, count), sampler_row(sampling, 0))
    logits = jnp.tile(jnp.asarray(LOGITS), (count, 1))
    return np.asarray(compiled()(logits, rows, jnp.arange(count, dtype=jnp.int32)))


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_draws_have_the_target_distribution(options):
    probability = target(LOGITS, **options)
    seen = np.bincount(draws(Sampling(**options, seed=7)), minlength=VOCABULARY)
    assert seen[probability == 0].sum() == 0
    expected = probability[probability > 0] * seen.sum()
    if len(expected) > 1:
        # The seed is fixed, so this passes always or never; a wrong distribution gives ~0.
        assert stats.chisquare(seen[probability > 0], expected).pvalue > 1e-3


def test_chi_square_notices_a_wrong_temperature():
    seen = np.bincount(draws(Sampling(temperature=1.1, seed=7)), minlength=VOCABULARY)
    assert stats.chisquare(seen, target(LOGITS) * seen.sum()).pvalue < 1e-3


def test_draws_depend_on_seed_request_and_position():
    logits = jnp.zeros((1, 1000))
    draw = lambda seed, number, position: int(
        compiled()(logits, sampler(Sampling(temperature=1.0, seed=seed), number=number), position)[
            0
        ]
    )
    at = lambda position: jnp.asarray([position], jnp.int32)
    first = draw(1, 0, at(5))
    assert draw(1, 0, at(5)) == first
    others = {draw(2, 0, at(5)), draw(1, 1, at(5)), draw(1, 0, at(6)), draw(2**32 - 1, 0, at(5))}
    assert first not in others and len(others) == 4


def test_row_of_the_batch_does_not_matter():
    sampling = Sampling(temperature=1.0, seed=4)
    rows = sampler(Sampling(), sampling, Sampling(temperature=2.0, seed=9), sampling)
    logits = jnp.tile(jnp.asarray(LOGITS), (4, 1))
    at = lambda size, position: jnp.full(size, position, jnp.int32)
    together = np.array([compiled()(logits, rows, at(4, n)) for n in range(20)])
    alone = [int(compiled()(logits[:1], sampler(sampling), at(1, n))[0]) for n in range(20)]
    assert together[:, 1].tolist() == together[:, 3].tolist() == alone
    assert (together[:, 0] == LOGITS.argmax()).all()
    assert len(set(alone)) > 1


def test_the_least_temperature_is_greedy_with_ties_drawn():
    """Far apart, so that with less the quotients would not be finite."""
    logits = jnp.asarray([[-3e4, 3e4, 1.0, 3e4]], jnp.float32)
    found = target_logits(logits, sampler(Sampling(temperature=LEAST_TEMPERATURE)))
    np.testing.assert_allclose(jax.nn.softmax(found), [[0, 0.5, 0, 0.5]], rtol=1e-6)


def test_greedy_ties_go_to_the_lowest_token():
    logits = jnp.asarray([[0.0, 3.0, 3.0], [3.0, 3.0, 3.0]])
    position = jnp.zeros(2, jnp.int32)
    assert compiled()(logits, greedy(2), position).tolist() == [1, 0]
    # Also in a batch in which another row is sampled.
    mixed = sampler(Sampling(), Sampling(temperature=1.0))
    assert compiled()(logits, mixed, position)[0] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": 1e-38}, "temperature is 1e-38; it must be 0 .* or at least 1e-30"),
        ({"top_k": -1}, "top-k is -1"),
        ({"top_p": 0.0}, "top-p is 0.0"),
        ({"top_p": 1.5}, "top-p is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**32}, "seed is 4294967296"),
    ],
)
def test_values_without_a_meaning(options, message):
    with pytest.raises(UserError, match=message):
        Sampling(**options)


# Through the engine


def sampled(**options):
    """Requests of several lengths, more of them than rows."""
    sampling = Sampling(temperature=1.0, **options)
    return [request(n, 12, seed=n, sampling=sampling) for n in (4, 30, 70, 11, 55)]


@pytest.mark.slow
def test_same_seed_same_text_for_every_policy_and_batch():
    requests = sampled(seed=3)
    tokens = run(engine("fixed", 4), requests).tokens
    assert run(engine("fixed", 4), requests).tokens == tokens
    assert run(engine("resident", 1), requests).tokens == tokens
    assert run(engine("adaptive", 24), requests).tokens == tokens
    assert run(engine("resident", 1, requests=1), requests).tokens == tokens


def test_tokens_are_the_draws_for_their_positions():
    """From the logits of dense attention, with the key of the request's number."""
    requests = sampled(seed=3)
    found = run(engine("fixed", 4), requests).tokens
    for number in (1, 4):  # each text has a length of its own, which compiles
        tokens = found[number]
        text = (*requests[number].prompt, *tokens)
        logits = jnp.asarray(dense_logits(*model(), text[:-1]))
        first = len(requests[number].prompt)
        one = sampler(requests[number].sampling, number=number)
        wanted = [
            int(compiled()(logits[None, at - 1], one, jnp.full(1, at, jnp.int32))[0])
            for at in range(first, len(text))
        ]
        assert tokens == wanted


def test_other_seed_other_text():
    served = engine("fixed", 4)
    one, other = run(served, sampled(seed=3)).tokens, run(served, sampled(seed=4)).tokens
    assert all(one[number] != other[number] for number in one)


def test_top_k_of_one_is_greedy():
    served = engine("fixed", 4)
    plain = [request(n, 12, seed=n) for n in (4, 30, 70, 11, 55)]
    assert run(served, sampled(top_k=1)).tokens == run(served, plain).tokens
