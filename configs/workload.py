"""How texts behave: how local their selections are, and how far a target follows its draft.

Published figures, and what follows from them. See `bench.traces` for the model behind the first.
"""

from collections.abc import Sequence

from dhisparse_jax.errors import UserError

EDGES = (1.0, 1.5, 2.0, 3.0, 4.0)
"""Where each band of the recency stack ends, in units of the top-K."""

SHARES = (0.70, 0.104, 0.062, 0.041, 0.026)
"""Share of a selection that falls into each band: the cache curve of GLM-5.1 (K = 2048)."""

EXPONENT = 0.6
"""The share deeper than x K goes with `x ** -EXPONENT` beyond the last edge, over the history."""

CROWDED = 1.26
"""Fetches of a verification whose working set exceeds the budget, in units of what they are with
room for it: 8 queries that select 2.3 K, with 2 K slots (`bench.simulate`, calibrated; 1.09 with
K slots)."""

PUBLISHED_SURVIVAL = (0.829, 0.723, 0.646, 0.587, 0.539, 0.500, 0.464)
"""Share of the drafts of which proposal i and all before it were accepted, as served for GLM-5.2 (a
DSpark of 7 proposals); none is published for GLM-5.3 with DFlash2. 5.29 tokens per step."""

PUBLISHED_TOKENS_PER_STEP = 3.97
"""Mean acceptance length published with it, the extra token included: over other texts."""

ATTACHED_TOKENS_PER_STEP = 3.4
"""The middle of the mean acceptance lengths, 3.2 to 3.6, that are published for DeepSeek-V4-Flash
and the DSpark of 5 proposals that it has attached, greedy; none is published for V4.1."""


def tokens_per_step(survival: Sequence[float]) -> float:
    """Expected tokens of a step: what survives, and the token after it."""
    return 1.0 + sum(survival)


def survival_for(mean: float, profile: Sequence[float]) -> tuple[float, ...]:
    """A profile raised to the power with which a step has so many tokens.

    Raises:
        UserError: if no power does.
    """
    least, most = 1.0, 1.0 + len(profile)
    if not least < mean < most:
        raise UserError(f"a mean of {mean:g} tokens per step is not between {least:g} and {most:g}")
    low, high = 0.0, 64.0
    for _ in range(60):
        power = (low + high) / 2
        survival = tuple(share**power for share in profile)
        low, high = (power, high) if tokens_per_step(survival) > mean else (low, power)
    return survival


ATTACHED_SURVIVAL = survival_for(ATTACHED_TOKENS_PER_STEP, PUBLISHED_SURVIVAL[:5])
"""A profile with that mean, of the shape of the published one."""


def missed(budget: float, history: float) -> float:
    """Share of a selection that a cache of the most recently selected positions lacks.

    Args:
        budget: positions in the cache, in units of the top-K.
        history: positions there are, in the same unit.
    """
    if budget >= history:
        return 0.0
    start, left = 0.0, 1.0
    for edge, share in zip(EDGES, SHARES, strict=True):
        if budget <= edge:
            return left - share * (budget - start) / (edge - start)
        start, left = edge, left - share
    if history <= start:
        return 0.0
    deeper = lambda depth: depth**-EXPONENT - history**-EXPONENT
    return left * deeper(budget) / deeper(start)


def fetched(budget: float, history: float, union: float, tokens: float) -> float:
    """What a step fetches for a request and pool, in units of the top-K.

    Queries at positions that an earlier step has verified select what was fetched then, so each
    accepted token fetches once.

    Args:
        budget: see `missed`.
        history: see `missed`.
        union: what all queries of the step select together, in the same unit.
        tokens: accepted per step.
    """
    crowded = CROWDED if union > budget and union > 1 else 1.0
    return min(union, crowded * tokens * missed(budget, history))
