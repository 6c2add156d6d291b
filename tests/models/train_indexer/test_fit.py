"""Indexers are fitted to a frozen model: what is captured, a killed run, and what it is for."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.errors import UserError
from dhisparse_jax.models.llama.attend import causal
from dhisparse_jax.models.llama.indexers import load_indexers
from dhisparse_jax.models.llama.load import Loaded
from dhisparse_jax.models.llama.whole import run_layers
from dhisparse_jax.models.params import flatten, params_of
from dhisparse_jax.models.train_indexer import loop
from dhisparse_jax.models.train_indexer.capture import capture
from dhisparse_jax.models.train_indexer.config import FitConfig
from dhisparse_jax.models.train_indexer.evaluate import look_for, text_losses
from dhisparse_jax.models.train_indexer.loop import Fit
from dhisparse_jax.models.train_indexer.texts import Texts
from tests.support.small_llama import FITTED, fields, indexers, model, tokens

CONFIG = FitConfig(
    fitted=FITTED, length=40, texts=2, queries=16, batch=8, steps=6, save_steps=3, counts=(4, 8)
)


def texts():
    rng = np.random.default_rng(1)
    drawn = [rng.integers(0, 128, 40).astype(np.int32) for _ in range(3)]
    return Texts(drawn[:2], {"left out": drawn[2]}, "digest")


def fit(out, config=CONFIG):
    words = None  # texts are given
    return Fit(config, Loaded(model(), words), "tiny.gguf", texts(), out)


def test_captured_attention_is_that_of_the_layers():
    positions = np.asarray([0, 7, 39], np.int32)
    found = capture(model(), FITTED, np.asarray(tokens()), positions)
    seen, wanted = causal(40), np.zeros((3, 40))

    def look(view):
        queries, keys, _ = (np.asarray(x, np.float64) for x in view.heads)
        logits = np.einsum("qhd,khd->hqk", queries[positions], keys.repeat(2, axis=1)) / 4
        weights = np.where(np.asarray(seen)[positions][None], np.exp(logits), 0)
        wanted[:] += (weights / weights.sum(axis=-1, keepdims=True)).mean(axis=0) / 2
        return seen

    run_layers(model(), tokens(), look)
    np.testing.assert_allclose(found.targets[0], wanted, atol=1e-3)
    np.testing.assert_allclose(found.targets.sum(axis=-1, dtype=np.float32), 1, atol=2e-3)


def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    whole = fit(tmp_path / "whole").run()
    monkeypatch.setattr(Fit, "_report", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "killed").run()
    monkeypatch.undo()
    monkeypatch.setattr(loop, "capture", None)  # what was captured is not captured again
    resumed = fit(tmp_path / "killed")
    (tmp_path / "killed" / "captured" / "left out.npz").write_bytes(
        (tmp_path / "whole" / "captured" / "left out.npz").read_bytes()
    )
    record = resumed.run()
    assert record.steps == whole.steps == 6
    assert record.curve == whole.curve
    first, second = (
        flatten(params_of(load_indexers(tmp_path / name / "indexers", model().config)))
        for name in ("whole", "killed")
    )
    for name, array in first.items():
        np.testing.assert_array_equal(array, jnp.asarray(second[name]))
    written = json.loads((tmp_path / "killed" / "run.json").read_text())
    assert written["left_out"]["mean"]["best"][0] >= written["left_out"]["mean"]["chosen"][0]
    with pytest.raises(UserError, match="another config"):
        fit(tmp_path / "killed", dataclasses.replace(CONFIG, rate=1.0)).run()


@pytest.mark.slow
def test_a_fit_finds_most_of_the_attention(tmp_path):
    config = dataclasses.replace(CONFIG, queries=40, batch=40, steps=300, save_steps=100)
    record = fit(tmp_path, config).run()
    first, last = record.curve[0]["divergence"][0], record.curve[-1]["divergence"][0]
    assert last < first / 2
    mean = record.left_out["mean"]
    assert mean["chosen"][1] > mean["window"][1]


def test_losses_are_those_of_the_logits():
    look = look_for("dense", 0, 40, indexers())
    logits = model().logits(run_layers(model(), tokens(), look))
    wanted = -jax.nn.log_softmax(logits[:-1])[jnp.arange(39), tokens()[1:]]
    np.testing.assert_allclose(text_losses(model(), tokens(), look), wanted, rtol=1e-5)
    assert fields()["llama.block_count"] == 2


@pytest.mark.parametrize("mode", ["indexer", "window"])
def test_to_see_everything_is_to_be_dense(mode):
    dense = text_losses(model(), tokens(), look_for("dense", 0, 40, indexers()))
    other = text_losses(model(), tokens(), look_for(mode, 40, 40, indexers()))
    np.testing.assert_array_equal(dense, other)


def test_batches_larger_than_what_is_kept_are_refused():
    with pytest.raises(UserError, match="17 of 16 queries"):
        dataclasses.replace(CONFIG, batch=17)
