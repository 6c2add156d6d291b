"""E3: emitted tokens have the model's distribution, with the draft and the texts at hand.

Twice. By enumeration: for the distributions p of the model and q of the draft at a position, the
chance that each candidate stands is found by bisection of the rule itself, so that the distribution
of the emitted token is exact; it must be p. By chi-square: the draft proposes and the rule accepts
many times with different keys, and the tokens that are emitted at every place, those of blocks that
stood so far, are counted against p there; so a draft that does not draw from the q that it states
is found too, and a rule that decides about a place by what it used for another.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dhisparse_jax.audit.findings import Difference, Level
from dhisparse_jax.engine.machine import Machine
from dhisparse_jax.sampling import Sampler, Sampling, sampler_row
from dhisparse_jax.speculation import accept as rules
from dhisparse_jax.speculation.protocol import DraftState, Proposal

Bounds = tuple[Float[Array, " n"], Float[Array, " n"]]
"""Lower and upper ends of intervals."""

MOST_OFF = 1e-5
"""That an enumerated probability may differ from the model's: float32 sums of a vocabulary."""

LEAST_CHANCE = 1e-12
"""Of a count so far off that the rule is held to be wrong, by chi-square: in cells of no more than
LEAST_EXPECTED counts it is really up to 1e-7, and every place of every request is looked at."""

COLUMNS = 256
"""Tokens that are enumerated: as many of the best of p and of q; of larger vocabularies the others
are left out of both."""

MOST_DRAWS, LEAST_DRAWS, DRAWN_LOGITS = 2000, 200, 1 << 26
LEAST_EXPECTED = 5.0
"""Counts below it are put together."""

BISECTIONS = 26
"""Halvings of the interval that holds a chance."""


@dataclasses.dataclass(frozen=True)
class Context:
    """Where a draft is asked, in the rows of an engine that has just read the prompts.

    Attributes:
        names: of the requests, by row.
        anchor: int32 first token after each prompt.
        length: int32 lengths of the prompts.
        logits: float32 of the model for the anchor and the tokens after it.
    """

    names: tuple[str, ...]
    anchor: Int[np.ndarray, " R"]
    length: Int[np.ndarray, " R"]
    logits: Float[np.ndarray, "R T V"]


Ask = Callable[[Sampler], Proposal]
"""What a draft proposes in a context, by how the requests choose."""


def asking(engine: Machine, draft_state: DraftState, context: Context) -> Ask:
    """The draft of an engine in a context.

    Args:
        engine: whose draft proposes.
        draft_state: of the draft, with the prompts read.
        context: what was read.
    """
    where = jnp.asarray(context.anchor), jnp.asarray(context.length)
    return partial(engine.drafter.propose, engine.draft_params, draft_state, *where)


def enumerate_rule(ask: Ask, context: Context, level: Level) -> None:
    """The exact distribution of what is emitted at every place of a proposal, against p."""
    first = jax.tree.map(lambda leaf: leaf[0], _samplers(context, 1))
    proposal = jax.device_get(jax.jit(lambda sampler: ask(sampler))(first))
    level.add(list(_enumerated(context, proposal, level)))


def draw_tokens(ask: Ask, context: Context, level: Level) -> None:
    """Chi-square of the tokens that are emitted at each place of a block, with many keys."""

    def emit(sampler: Sampler) -> rules.Emitted:
        logits, length = jnp.asarray(context.logits), jnp.asarray(context.length)
        live = jnp.full(length.shape, logits.shape[1], jnp.int32)
        return rules.accept(logits, ask(sampler), live, length, sampler)

    draws = int(np.clip(DRAWN_LOGITS // context.logits.size, LEAST_DRAWS, MOST_DRAWS))
    emitted = jax.jit(lambda every: lax.map(emit, every))(_samplers(context, draws))
    level.add(list(_counted(context, jax.device_get(emitted), level)))


def _samplers(context: Context, count: int) -> Sampler:
    """Samplers of all rows at temperature 1, `count` times, each with keys of its own."""
    one = sampler_row(Sampling(temperature=1.0), 0)
    shape = (count, len(context.length))
    every = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, shape), one)
    return dataclasses.replace(every, key=jax.random.split(one.key[0], shape))


def _enumerated(context: Context, proposal: Proposal, level: Level) -> Iterator[Difference]:
    """See `enumerate_rule`."""
    emitted = jax.jit(lambda p, q: _emitted(p, q))  # jit would know a rule that was replaced since
    places = proposal.tokens.shape[1]
    for place, (row, name) in itertools.product(range(places), enumerate(context.names)):
        position = int(context.length[row]) + 1 + place
        p = softmax(context.logits[row, place])
        q = np.zeros_like(p)
        candidates = proposal.candidates[row, place]
        np.add.at(
            q, candidates[candidates >= 0], proposal.probabilities[row, place][candidates >= 0]
        )
        where = {"request": name, "step": 1, "position": position}
        if abs(q.sum() - 1.0) > MOST_OFF or q[proposal.tokens[row, place]] <= 0.0:
            detail = f"q sums to {q.sum():.6g}"
            yield Difference("the draft's q is none of its token", **where, detail=detail)
            continue
        columns = _columns(p, q)
        p, q = (_normal(all_of[columns]) for all_of in (p, q))
        both = np.asarray(emitted(jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32)))
        level.counts["positions enumerated"] += 1
        level.counts["candidates enumerated"] += len(columns)
        for found, whole in zip(both, ("", " after a block that stood whole"), strict=True):
            off = np.abs(found - p)
            level.figures["largest error of a probability"] = max(
                level.figures.get("largest error of a probability", 0.0), float(off.max())
            )
            if not off.max() <= MOST_OFF:
                at = int(off.argmax())
                detail = f"token {columns[at]} comes with {found[at]:.6g} instead of {p[at]:.6g}"
                yield Difference("the rule of acceptance is biased", **where, detail=detail + whole)


def _columns(p: Float[np.ndarray, " V"], q: Float[np.ndarray, " V"]) -> Int[np.ndarray, " n"]:
    """Tokens to enumerate: all, or the best of both; as many in every call."""
    if len(p) <= 2 * COLUMNS:
        return np.arange(len(p))
    best = np.argsort(-p)[: 2 * COLUMNS]
    wanted = np.concatenate([np.argsort(-q)[:COLUMNS], best])
    _, first = np.unique(wanted, return_index=True)
    return wanted[np.sort(first)][: 2 * COLUMNS]


def _emitted(p: Float[Array, " n"], q: Float[Array, " n"]) -> Float[Array, "2 n"]:
    """The distributions of what a block of one proposal emits, by the rule itself.

    First of its first token, then of the one that follows where the proposal stands.
    """
    tokens = jnp.arange(p.shape[0], dtype=jnp.int32)
    target = jnp.stack([p, p])
    live = jnp.int32(2)

    def block(token: Int[Array, ""]) -> Proposal:
        return Proposal(
            tokens=token[None],
            candidates=tokens[None],
            probabilities=q[None],
            confidence=jnp.ones(1, jnp.float32),
        )

    def stands(token: Int[Array, ""], chance: Float[Array, ""]) -> Bool[Array, ""]:
        return rules.standing(target, block(token), live, chance[None]) > 0

    def halve(bounds: Bounds, _: None) -> tuple[Bounds, None]:
        low, high = bounds
        middle = (low + high) / 2
        yes = jax.vmap(stands)(tokens, middle)
        return (jnp.where(yes, middle, low), jnp.where(yes, high, middle)), None

    ends = (jnp.zeros_like(p), jnp.ones_like(p))
    (chance, _), _ = lax.scan(halve, ends, None, length=BISECTIONS)
    rest = rules.remainder(target, block(tokens[0]), live, jnp.int32(0))
    fallen = (q * (1.0 - chance)).sum()
    after = rules.remainder(target, block(tokens[0]), live, jnp.int32(1))
    return jnp.stack([q * chance + fallen * rest / rest.sum(), after / after.sum()])


def _counted(context: Context, emitted: rules.Emitted, level: Level) -> Iterator[Difference]:
    """Chi-square of the emitted tokens of every request, place by place."""
    places = context.logits.shape[1]
    for place, (row, name) in itertools.product(range(places), enumerate(context.names)):
        tokens = emitted.tokens[emitted.count[:, row] > place, row, place]
        statistic, cells = _chi_square(np.asarray(tokens), softmax(context.logits[row, place]))
        level.counts["tokens drawn"] += len(tokens)
        if cells < 2:
            continue
        likely = float(jax.scipy.special.gammaincc((cells - 1) / 2, statistic / 2))
        lowest = level.figures.get("lowest chance of a count", 1.0)
        level.figures["lowest chance of a count"] = min(lowest, likely)
        if likely < LEAST_CHANCE:
            detail = f"chi-square {statistic:.4g} in {cells} cells, {len(tokens)} draws"
            yield Difference(
                "what is drawn has not the model's distribution",
                request=name,
                step=1,
                position=int(context.length[row]) + 1 + place,
                detail=detail,
            )


def _chi_square(tokens: Int[np.ndarray, " n"], p: Float[np.ndarray, " V"]) -> tuple[float, int]:
    """The statistic, and of how many cells; of fewer than two it says nothing."""
    expected = len(tokens) * p
    observed = np.bincount(tokens, minlength=len(expected))[: len(expected)]
    rare = expected < LEAST_EXPECTED
    cells, seen = expected[~rare], observed[~rare]
    if rare.any():
        cells, seen = np.append(cells, expected[rare].sum()), np.append(seen, observed[rare].sum())
    return float(((seen - cells) ** 2 / np.maximum(cells, 1.0)).sum()), len(cells)


def softmax(logits: Float[np.ndarray, " V"]) -> Float[np.ndarray, " V"]:
    """Probabilities in float64."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return _normal(weights)


def _normal(weights: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    return weights / weights.sum()
