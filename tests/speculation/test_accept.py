"""Acceptance is exact: what is emitted has the target's distribution, whatever q is.

By enumeration: for V = 4 and N = 2, every block that q can make, weighted with its probability; the
uniform number at which a proposal falls is found by bisection, so the joint distribution of the
emitted tokens is exact, and must be the target's. By chi-square: draws with fixed seeds on a larger
vocabulary, through the whole of `accept`. Both must notice a rule that is wrong.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dhisparse_jax.sampling import (
    Sampling,
    choose,
    draw,
    greedy,
    proposal_keys,
    sampler_row,
    target_logits,
)
from dhisparse_jax.speculation import accept as module
from dhisparse_jax.speculation.accept import Emitted, accept, remainder, standing, stop_at
from dhisparse_jax.speculation.protocol import NoDraft, Proposal
from tests.support.mutants import always, own_row, soft_as_hard

V, N = 4, 2


def rows_of(sampling, count):
    """A sampler of `count` requests that are asked for alike, with a key each."""
    one = sampler_row(sampling, 0)
    rows = jax.tree.map(lambda leaf: jnp.repeat(leaf, count), one)
    return dataclasses.replace(rows, key=jax.random.split(one.key[0], count))


class Chain:
    """A target or a draft: the distribution of a token depends on those before it in the block."""

    def __init__(self, seed, vocabulary, length, depends, sharpness=1.5):
        rng = np.random.default_rng(seed)
        self.vocabulary, self.depends = vocabulary, depends
        shape = [vocabulary] * (length - 1) + [length, vocabulary]
        self.logits = (rng.normal(size=shape) * sharpness).astype(np.float32)

    def row(self, before, place):
        """Logits of the token at `place` after the tokens `before` of the block."""
        index = [0] * (self.logits.ndim - 2)
        for number, token in enumerate(before[:place]):
            if self.depends == "all" or (self.depends == "last" and number == place - 1):
                index[number] = token
        return self.logits[(*index, place)]

    def table(self, blocks, place):
        return np.stack([self.row(block, place) for block in blocks])


def softmax(logits):
    logits = logits.astype(np.float64)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def draft_rows(kind, seed=1, vocabulary=V):
    """Distributions of a draft: (block, place) -> (candidates, q); None marks argmax."""
    depends = {"independent": "none", "one-hot": "none", "selector": "last", "markov": "last"}
    chain = Chain(seed, vocabulary, N, depends[kind])

    def row(block, place):
        logits = chain.row(block, place)
        if kind == "one-hot":
            return np.array([logits.argmax()]), np.ones(1)
        if kind == "selector":  # the best two of a list that does not depend on the block
            best = np.sort(np.argsort(-chain.row((0,) * N, place))[: vocabulary // 2])
            return best, softmax(logits[best])
        return np.arange(vocabulary), softmax(logits)

    return row


def blocks_of(row):
    """Every draft block that q can make: tokens, probability, candidates and q per place."""
    for block in itertools.product(range(V), repeat=N):
        places = [row(block, place) for place in range(N)]
        mass = 1.0
        for token, (candidates, q) in zip(block, places, strict=True):
            mass *= float(q[candidates == token].sum())
        if mass > 0:
            yield block, mass, places


def proposal_of(tokens, candidates, q):
    return Proposal(
        tokens=jnp.asarray(tokens, jnp.int32),
        candidates=jnp.asarray(candidates, jnp.int32),
        probabilities=jnp.asarray(q, jnp.float32),
        confidence=jnp.ones(np.shape(tokens), jnp.float32),
    )


def threshold(rule, target, proposal, place):
    """The uniform number below which the proposal at `place` stands, all before it standing."""
    low, high = 0.0, 1.0
    for _ in range(26):
        middle = (low + high) / 2
        chance = jnp.asarray([0.0] * place + [middle] + [1.0] * (N - 1 - place), jnp.float32)
        stands = int(rule(target, proposal, jnp.int32(N + 1), chance)) > place
        low, high = (middle, high) if stands else (low, middle)
    return low


def emitted_joint(kind, target, sampling, *, rule=standing, rest=remainder):
    """Exact joint distribution of the first two emitted tokens, by enumeration.

    A block that emits one token only is followed by a draw from the target's own row.
    """
    rule, rest = jax.jit(rule), jax.jit(rest)
    joint = np.zeros((V, V))
    for block, mass, places in blocks_of(draft_rows(kind)):
        rows = probabilities(np.stack([target.row(block, i) for i in range(N + 1)]), sampling)
        candidates, q = (np.stack([place[part] for place in places]) for part in (0, 1))
        proposal = proposal_of(block, candidates, q)
        stands = [threshold(rule, rows, proposal, place) for place in range(N)]
        reach = np.cumprod([1.0, *stands])
        after = lambda a, rows=rows, proposal=proposal: rest(
            rows, proposal, jnp.int32(N + 1), jnp.int32(a)
        )
        for token, chance in enumerate(normal(after(0))):
            own = probabilities(target.row((token, 0), 1)[None], sampling)[0]
            joint[token] += mass * (reach[0] - reach[1]) * chance * np.asarray(own, np.float64)
        joint[block[0]] += mass * (reach[1] - reach[2]) * normal(after(1))
        joint[block] += mass * reach[2]
    return joint


def normal(weights):
    weights = np.asarray(weights, np.float64)
    return weights / weights.sum()


def probabilities(logits, sampling):
    rows = rows_of(sampling, len(logits))
    return jax.nn.softmax(target_logits(jnp.asarray(logits), rows), axis=-1)


def target_joint(target, sampling):
    """The joint distribution of two tokens decoded one by one."""
    first = np.asarray(probabilities(target.table([(0, 0)], 0), sampling), np.float64)[0]
    second = probabilities(target.table([(token, 0) for token in range(V)], 1), sampling)
    return first[:, None] * np.asarray(second, np.float64)


TARGET = Chain(0, V, N + 1, "all")
KINDS = ["one-hot", "independent", "selector", "markov"]
FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 3, "top_p": 0.7},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_emitted_joint_is_the_target_joint(kind, options):
    sampling = Sampling(**options)
    found, wanted = emitted_joint(kind, TARGET, sampling), target_joint(TARGET, sampling)
    assert found.sum() == pytest.approx(1.0, abs=1e-6)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    np.testing.assert_array_equal(found[wanted == 0], 0.0)


MUTANTS = [{"rest": own_row}, {"rule": soft_as_hard}, {"rule": always}]
NAMES = ["own_row", "soft_as_hard", "always"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=NAMES)
def test_enumeration_notices_a_wrong_rule(mutant):
    sampling = Sampling(temperature=1.0)
    found = emitted_joint("markov", TARGET, sampling, **mutant)
    assert abs(found - target_joint(TARGET, sampling)).max() > 1e-2


# By chi-square, on a vocabulary of 40

WIDE = 40
DRAWS = 40_000


def wide_case(kind):
    """Logits of a target, a draft that resembles it, and how the draft chooses."""
    rng = np.random.default_rng(5)
    target = rng.normal(size=(N + 1, WIDE)).astype(np.float32) * 2
    guess = target[:N] + rng.normal(size=(N, WIDE)).astype(np.float32)
    if kind == "one-hot":
        candidates = guess.argmax(axis=-1)[:, None]
    elif kind == "selector":
        candidates = np.argsort(-guess, axis=-1)[:, :8]
    else:
        candidates = np.tile(np.arange(WIDE), (N, 1))
    return target, candidates, np.take_along_axis(guess, candidates, axis=-1)


def emitted_tokens(kind, sampling, live=N + 1):
    """The whole path for many requests: propose with keys, verify, accept."""
    target, candidates, scores = wide_case(kind)
    rows = rows_of(sampling, DRAWS)
    length = jnp.arange(DRAWS, dtype=jnp.int32) % 50

    @jax.jit
    def go(rows, length):
        place = []
        for i in range(N):
            keys = proposal_keys(rows, length, i)
            logits = jnp.tile(jnp.asarray(scores[i])[None], (DRAWS, 1))
            place.append(jnp.asarray(candidates[i], jnp.int32)[draw(logits, keys)])
        q = jax.nn.softmax(jnp.asarray(scores), axis=-1)
        repeat = lambda x: jnp.tile(x[None], (DRAWS,) + (1,) * x.ndim)
        proposal = proposal_of(
            jnp.stack(place, axis=1), repeat(jnp.asarray(candidates, jnp.int32)), repeat(q)
        )
        logits = repeat(jnp.asarray(target))
        return accept(logits, proposal, jnp.full(DRAWS, live, jnp.int32), length, rows)

    return jax.device_get(go(rows, length)), target


def fit(tokens, logits, sampling):
    """p-value of a chi-square test; 0 where something impossible was emitted."""
    wanted = np.asarray(probabilities(logits[None], sampling), np.float64)[0]
    seen = np.bincount(tokens, minlength=WIDE)
    if seen[wanted == 0].sum():
        return 0.0
    expected = normal(wanted) * seen.sum()
    rare = expected < 5  # together: the test needs cells of some size
    merged = lambda counts: np.append(counts[~rare], counts[rare].sum())
    return stats.chisquare(merged(seen), np.maximum(merged(expected), 1e-9)).pvalue


def worst_fit(emitted, target, sampling):
    """The smallest p-value over places; a place counts where a block reaches it."""
    reached = [emitted.tokens[emitted.count > place, place] for place in range(N + 1)]
    return min(
        fit(tokens, target[place], sampling)
        for place, tokens in enumerate(reached)
        if len(tokens) > 1000
    )


@pytest.mark.parametrize("options", FILTERS[1:4], ids=str)
@pytest.mark.parametrize("kind", ["one-hot", "selector", "markov"])
def test_draws_have_the_target_distribution(kind, options):
    """Rows of this target do not depend on the block, so every place has a known distribution."""
    sampling = Sampling(**options, seed=3)
    emitted, target = emitted_tokens(kind, sampling)
    assert len(set(emitted.count.tolist())) == N + 1
    # The seed is fixed, so this passes always or never; a wrong distribution gives ~0.
    assert worst_fit(emitted, target, sampling) > 1e-3


@pytest.mark.parametrize("live", [1, 2])
def test_shorter_verification_draws_the_bonus_from_the_target(live):
    sampling = Sampling(temperature=0.6, seed=3)
    emitted, target = emitted_tokens("markov", sampling, live)
    assert emitted.count.max() == live
    assert worst_fit(emitted, target, sampling) > 1e-3


@pytest.mark.parametrize(
    ("name", "mutant"),
    [("remainder", own_row), ("standing", soft_as_hard), ("standing", always)],
    ids=NAMES,
)
def test_chi_square_notices_a_wrong_rule(monkeypatch, name, mutant):
    monkeypatch.setattr(module, name, mutant)
    sampling = Sampling(temperature=0.6, seed=3)
    emitted, target = emitted_tokens("markov", sampling)
    assert worst_fit(emitted, target, sampling) < 1e-6


# Greedy, stop tokens, lengths


def greedy_case(matches, live):
    """One request whose proposals equal the target's best tokens where `matches` says so."""
    rng = np.random.default_rng(9)
    logits = rng.normal(size=(1, len(matches) + 1, WIDE)).astype(np.float32)
    best = logits.argmax(axis=-1)[0]
    tokens = np.where(matches, best[:-1], (best[:-1] + 1) % WIDE)[None]
    proposal = proposal_of(tokens, tokens[..., None], np.ones((*tokens.shape, 1)))
    length = jnp.zeros(1, jnp.int32)
    emitted = accept(jnp.asarray(logits), proposal, length + live, length, greedy(1))
    return emitted, best


@pytest.mark.parametrize("live", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("matches", list(itertools.product([False, True], repeat=3)), ids=str)
def test_greedy_is_the_longest_prefix(matches, live):
    emitted, best = greedy_case(np.array(matches), live)
    prefix = len(list(itertools.takewhile(bool, matches)))
    count = min(prefix + 1, live)
    assert int(emitted.count[0]) == count
    np.testing.assert_array_equal(emitted.tokens[0, :count], best[:count])


def test_greedy_and_sampled_rows_of_one_batch_do_not_mix():
    """Each row of a mixed batch gets what it gets alone, wherever it stands."""
    target, candidates, scores = wide_case("markov")
    repeat = lambda x: np.tile(x[None], (4,) + (1,) * x.ndim)
    q = softmax(scores)
    tokens = q.argmax(axis=-1)
    proposal = proposal_of(repeat(tokens), repeat(candidates), repeat(q))
    sampler = rows_of(Sampling(temperature=1.0, seed=1), 4)
    heat = jnp.asarray([0.0, 1.0, 0.0, 1.0])
    sampler = dataclasses.replace(sampler, temperature=heat)
    live, length = jnp.full(4, N + 1, jnp.int32), jnp.full(4, 7, jnp.int32)
    inputs = (jnp.asarray(repeat(target)), proposal, live, length, sampler)
    together = jax.device_get(accept(*inputs))
    order = np.array([3, 0, 2, 1])
    permuted = jax.tree.map(lambda leaf: leaf[order], inputs)
    shuffled = jax.device_get(accept(*permuted))
    np.testing.assert_array_equal(shuffled.tokens, together.tokens[order])
    for row in range(4):
        alone = jax.device_get(accept(*jax.tree.map(lambda leaf, row=row: leaf[row][None], inputs)))
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        assert alone.count[0] == together.count[row]


def test_without_a_draft_the_token_is_what_choose_chooses():
    target, _, _ = wide_case("markov")
    rows = rows_of(Sampling(temperature=0.8, top_k=9, seed=2), 64)
    logits = jnp.tile(jnp.asarray(target[0])[None], (64, 1))
    length = jnp.arange(64, dtype=jnp.int32)
    none = NoDraft().propose((), (), length, length, rows)
    emitted = accept(logits[:, None], none, jnp.ones(64, jnp.int32), length, rows)
    np.testing.assert_array_equal(emitted.count, 1)
    np.testing.assert_array_equal(emitted.tokens[:, 0], choose(logits, rows, length + 1))


@pytest.mark.parametrize(
    ("tokens", "count", "stop", "wanted"),
    [
        ([5, 6, 7, 8], 4, [6, -1], (2, True)),
        ([5, 6, 7, 8], 4, [8, 5], (1, True)),
        ([5, 6, 7, 8], 4, [9, -1], (4, False)),
        ([5, 6, 7, 8], 2, [7, 8], (2, False)),
        ([5, -1, 7, 8], 0, [5, -1], (0, False)),
    ],
)
def test_a_block_ends_at_its_first_stop_token(tokens, count, stop, wanted):
    emitted = Emitted(tokens=jnp.asarray([tokens]), count=jnp.asarray([count], jnp.int32))
    cut, stopped = stop_at(emitted, jnp.asarray([stop], jnp.int32))
    assert (int(cut.count[0]), bool(stopped[0])) == wanted
