"""The bundled drafts: of the promised size, and as good on left-out text as their records say."""

import json
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.models.checkpoint import load_checkpoint
from dhisparse_jax.models.draft.checkpoint import load_own_draft
from dhisparse_jax.models.draft.registry import BUNDLED_DRAFTS
from dhisparse_jax.models.glm.decode import serve
from dhisparse_jax.models.params import params_of
from dhisparse_jax.models.registry import BUNDLED
from dhisparse_jax.models.train.corpus import load_evaluation
from dhisparse_jax.models.train.loop import run_key
from dhisparse_jax.models.train_draft.config import smoke_config
from dhisparse_jax.models.train_draft.continuations import Prompts, continue_text
from dhisparse_jax.models.train_draft.evaluate import accepted_counts, evaluation_texts, walk

pytestmark = pytest.mark.slow


CONTEXT, PIECES = 384, 8


def record(kind):
    return json.loads((BUNDLED_DRAFTS[kind] / "run.json").read_text(encoding="utf-8"))


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", BUNDLED_DRAFTS)
def test_a_bundled_draft_has_at_most_four_megabytes(kind):
    assert size(BUNDLED_DRAFTS[kind]) <= 4_000_000


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_the_record_says_that_three_tokens_come_per_step(kind):
    final = record(kind)["final"]
    assert final["accept_length"] >= 3.0
    assert final["accept_length"] == pytest.approx(1 + sum(final["accept_by_position"]), abs=0.01)
    assert len(final["accept_by_position"]) == 7


@cache
def left_out():
    """Pieces of the left-out modules, continued by the target; on the CPU, in float32."""
    config, model = load_checkpoint(BUNDLED["tiny"], dtype=jnp.float32)
    served, params = serve(model, "float32")
    pieces = evaluation_texts(load_evaluation(), context=CONTEXT, stride=60_000, batch=PIECES)
    texts = jnp.asarray(pieces[:PIECES])
    half = jnp.full(PIECES, CONTEXT // 2, jnp.int32)
    prompts = Prompts(texts, half, jnp.zeros(PIECES, jnp.float32))
    run = jax.jit(lambda prompts: continue_text(served, params, prompts, run_key(0)))
    return config, params_of(model), run(prompts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_three_tokens_per_step_are_measured_again(kind):
    target, weights, texts = left_out()
    draft, params = load_own_draft(BUNDLED_DRAFTS[kind])
    config = smoke_config(draft, seed=0, context=CONTEXT)
    count = jax.jit(partial(accepted_counts, config, target))
    accepted = walk(np.asarray(count(weights, params, texts)), draft.length)
    assert accepted.steps > 100
    assert accepted.length >= 2.7  # a sample of few pieces
