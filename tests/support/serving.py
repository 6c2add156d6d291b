"""Engines over the toy model, one per configuration and process, and what a run of one produced."""

import dataclasses
from functools import cache

import jax
import numpy as np

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.events import Acceptance, Finished, NewTokens, StepDone, StepMetrics
from dhisparse_jax.engine.forced import forced_logits
from dhisparse_jax.engine.request import Request
from dhisparse_jax.hierarchy.invariants import check_invariants
from tests.support.toy_model import toy

CONTEXT = 96
TOP_K = 8
CHUNK = 16
POLICIES = {"resident": ("resident", 1), "fixed": ("fixed", 4), "adaptive": ("adaptive", 24)}
"""Policy and hot rows: the whole history, half of K, and three times K on average."""


@cache
def model():
    """Two pools with one and two layers, whose records have the same size."""
    return toy(layers_per_pool=(1, 2), top_k=TOP_K, context=CONTEXT)


def config(policy, hot_rows, *, requests=3, queries=1, **sizes):
    return HierarchyConfig(
        geometry=model()[0].geometry,
        policy=Policy(policy),
        requests=requests,
        capacity=CONTEXT,
        queries=queries,
        hot_rows=hot_rows,
        tail=max(4, 2 * queries),
        **sizes,
    )


def engine(policy, hot_rows, **sizes):
    """An engine shared by all tests of this process: compiling one takes seconds.

    Between tests no request runs in it, and it knows no texts.
    """
    served = _engine(policy, hot_rows, **sizes)
    served.sharing.forget()
    return served


@cache
def _engine(policy, hot_rows, **sizes):
    return Engine(*model(), config(policy, hot_rows, **sizes), chunk=CHUNK)


def drafted(policy, hot_rows, draft, sizes=(), **options):
    """An engine with a drafter; not shared, since a draft is not hashable."""
    cfg = config(policy, hot_rows, queries=draft.drafter.length + 1, **dict(sizes))
    return Engine(*model(), cfg, chunk=CHUNK, draft=draft, **options)


def prompt(length, seed=0):
    vocabulary = model()[0].vocabulary
    return tuple(np.random.default_rng(seed).integers(0, vocabulary, length).tolist())


def request(length, new, seed=0, **options):
    """A request with a random prompt."""
    return Request(
        name=f"{length}+{new}", prompt=prompt(length, seed), max_new_tokens=new, **options
    )


@dataclasses.dataclass
class Run:
    """What a run reported."""

    tokens: dict
    finished: dict
    steps: list
    acceptance: Acceptance

    @property
    def total(self):
        return sum(self.steps, StepMetrics())


def run(engine, requests, after_step=lambda: None):
    """Run to the end, with nothing known of earlier runs.

    `after_step` is called after every decode step.
    """
    engine.sharing.forget()
    tokens = {n: [] for n in range(len(requests))}
    result = Run(tokens=tokens, finished={}, steps=[], acceptance=Acceptance())
    for event in engine.run(requests):
        match event:
            case NewTokens(number, tokens):
                result.tokens[number].extend(tokens)
            case Finished(number, reason):
                result.finished[number] = reason
            case StepDone(_, metrics, acceptance):
                result.steps.append(metrics)
                result.acceptance += acceptance
                after_step()
    assert is_idle(engine)
    return result


def is_idle(engine):
    """No row is occupied and every page is free."""
    state = jax.device_get(engine.state)
    free = all((hot.owner < 0).all() for hot in state.hot)
    free &= not engine.sharing.pages.users.any() and (state.host_page_of < 0).all()
    return free and not state.active.any() and not state.length.any() and not state.budget.any()


def forced(served, tokens, split):
    """Logits of a text, of which `split` tokens are prefilled; rows that its decoding fetched."""
    logits, fetched = [], 0
    for event in forced_logits(served, tokens.tolist(), split):
        if isinstance(event, np.ndarray):
            logits.append(event)
        elif isinstance(event, StepDone):
            fetched += event.metrics.fetched_rows
    return np.concatenate(logits), fetched


def failed(served):
    """Names of the invariants that do not hold."""
    report = check_invariants(served.state, served.cfg)
    return [name for name, holds in report.items() if not holds]
