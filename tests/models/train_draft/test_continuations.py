import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.models.glm.decode import serve
from dhisparse_jax.models.glm.dense import forward
from dhisparse_jax.models.train.loop import run_key
from dhisparse_jax.models.train_draft.continuations import Prompts, continue_text


def continued(target, text, prefix, temperature):
    served, params = serve(target, "float32")
    prompts = Prompts(text, jnp.asarray(prefix, jnp.int32), jnp.asarray(temperature, jnp.float32))
    run = jax.jit(lambda prompts: continue_text(served, params, prompts, run_key(0)))
    return np.asarray(run(prompts))


@pytest.mark.slow
def test_a_continuation_is_what_the_whole_sequence_model_says_next(target, text):
    prefix = np.array([1, 7, 20, 47])
    tokens = continued(target, text, prefix, np.zeros(4))
    logits = np.asarray(forward(target, jnp.asarray(tokens, jnp.int32), mode="sparse"))
    for row, start in enumerate(prefix):
        np.testing.assert_array_equal(tokens[row, :start], text[row, :start])
        picked = np.take_along_axis(logits[row, :-1], tokens[row, 1:, None].astype(int), -1)[:, 0]
        best = logits[row, :-1].max(axis=-1)
        np.testing.assert_allclose(picked[start - 1 :], best[start - 1 :], atol=1e-4)
    assert (tokens[0, 1:] != text[0, 1:]).any()


def test_rows_with_a_temperature_are_drawn(target, text):
    greedy = continued(target, text, np.full(4, 8), np.zeros(4))
    mixed = continued(target, text, np.full(4, 8), np.array([0.0, 1.0, 0.0, 1.0]))
    np.testing.assert_array_equal(mixed[::2], greedy[::2])
    assert (mixed[1::2] != greedy[1::2]).any(axis=1).all()
