"""The drafts in the engine: the text stays the same, and acceptance is what training measures."""

import dataclasses
import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.events import NewTokens
from dhisparse_jax.engine.request import Request
from dhisparse_jax.models.draft.block import Vocabulary
from dhisparse_jax.models.draft.checkpoint import build_draft, make_draft
from dhisparse_jax.models.draft.config import MarkovConfig
from dhisparse_jax.models.draft.drafter import drafter_of
from dhisparse_jax.models.glm.decode import serve
from dhisparse_jax.models.params import params_of
from dhisparse_jax.models.train_draft.config import bundled_draft, smoke_config
from dhisparse_jax.models.train_draft.evaluate import accepted_counts
from dhisparse_jax.speculation.protocol import NO_DRAFT, Draft
from tests.support.small_draft import noisy
from tests.support.small_glm import SMALL, small_model

pytestmark = pytest.mark.slow


PROMPT, NEW = 24, 64


@cache
def target():
    model = small_model()
    return model, *serve(model, "float32")


def request(seed):
    prompt = np.random.default_rng(seed).integers(1, 256, PROMPT).tolist()
    return Request(name=str(seed), prompt=tuple(prompt), max_new_tokens=NEW)


def generate(draft, requests, policy="resident"):
    """Tokens of every request, and how many came at a time."""
    _, served, params = target()
    cfg = HierarchyConfig(
        geometry=served.geometry,
        policy=Policy(policy),
        requests=2,
        capacity=SMALL.context,
        queries=draft.drafter.length + 1,
        hot_rows=16,
        tail=16,
    )
    engine = Engine(served, params, cfg, chunk=16, draft=draft)
    tokens = {number: [] for number in range(len(requests))}
    sizes = {number: [] for number in range(len(requests))}
    for event in engine.run(requests):
        if isinstance(event, NewTokens):
            tokens[event.request].extend(event.tokens)
            sizes[event.request].append(len(event.tokens))
    return tokens, sizes


@cache
def plain():
    return generate(NO_DRAFT, [request(0), request(1), request(2)])[0]


def config_of(kind):
    config = dataclasses.replace(bundled_draft(kind, SMALL), windows=(20,) * 3)
    if kind == "dspark":
        config = dataclasses.replace(config, markov=MarkovConfig(rank=SMALL.vocab_size))
    return dataclasses.replace(config, param_dtype="float32")


@cache
def draft_params(kind):
    """Random weights; a DSpark knows which token followed each one in the target's texts."""
    config = config_of(kind)
    params = noisy(params_of(make_draft(config, jnp.float32)))
    if kind == "dspark":
        follows = np.zeros((SMALL.vocab_size, SMALL.vocab_size), np.float32)
        for tokens in plain().values():
            for before, after in itertools.pairwise(tokens):
                follows[before] = 0
                follows[before, after] = 200
        head = {
            "markov_w1": {"weight": jnp.eye(SMALL.vocab_size)},
            "markov_w2": {"kernel": jnp.asarray(follows)},
        }
        params = params | {"markov_head": head}
    return params


@cache
def draft(kind):
    model, config = target()[0], config_of(kind)
    vocabulary = Vocabulary(model.embedding[...], model.head.kernel[...])
    built = build_draft(config, draft_params(kind), jnp.float32)
    return Draft(*drafter_of(built, config, vocabulary, positions=SMALL.context))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "policy"), [("dflash", "resident"), ("dflash2", "fixed"), ("dspark", "adaptive")]
)
def test_no_draft_changes_a_text(kind, policy):
    assert generate(draft(kind), [request(0), request(1), request(2)], policy)[0] == plain()


@pytest.mark.slow
def test_acceptance_in_the_engine_is_what_training_measures():
    model, _, _ = target()
    config = smoke_config(config_of("dspark"), seed=0, context=PROMPT + NEW)
    config = dataclasses.replace(config, eval_batch=2)
    asked = [request(0), request(1)]
    tokens, sizes = generate(draft("dspark"), asked)
    texts = np.array([[*asked[n].prompt, *tokens[n]] for n in (0, 1)])
    counts = accepted_counts(
        config,
        model.config,
        params_of(model),
        jax.tree.map(jnp.asarray, draft_params("dspark")),
        jnp.asarray(texts, jnp.uint8),
    )
    first = texts.shape[1] // 2 - 1  # position of the first anchor that is counted
    compared = []
    for row in (0, 1):
        at = PROMPT  # of the anchor: the token that the prefill gave
        for size in sizes[row][1:]:
            if first <= at < first + counts.shape[1]:
                compared.append((size, int(counts[row, at - first]) + 1))
            at += size
    assert all(a == b for a, b in compared), compared
    assert len(compared) > 6
    assert len({size for size, _ in compared}) > 2
