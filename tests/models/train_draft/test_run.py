import dataclasses
import json
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.errors import UserError
from dhisparse_jax.models.draft.checkpoint import (
    abstract_draft,
    build_draft,
    load_own_draft,
    make_draft,
)
from dhisparse_jax.models.draft.drafter import drafter_of
from dhisparse_jax.models.glm.dense import forward
from dhisparse_jax.models.params import flatten, params_of
from dhisparse_jax.models.train.loop import run_key
from dhisparse_jax.models.train_draft.__main__ import main
from dhisparse_jax.models.train_draft.config import DraftTrainConfig, bundled_draft
from dhisparse_jax.models.train_draft.evaluate import accepted_counts, evaluation_texts, walk
from dhisparse_jax.models.train_draft.loop import DraftTrainer, warm_start
from dhisparse_jax.models.train_draft.step import (
    DraftState,
    Texts,
    block_truth,
    draft_optimizer,
    draw_anchors,
    make_chunk,
    rate_at,
    read_texts,
    vocabulary_of,
)
from dhisparse_jax.sampling import greedy
from tests.support.small_draft import noisy
from tests.support.small_glm import SMALL

pytestmark = pytest.mark.slow


KINDS = ("dflash", "dflash2", "dspark")


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_learns_a_text(kind, config_of, target, weights):
    config = config_of(kind, rounds_per_chunk=4, rate=3e-3)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(np.tile(rng.integers(97, 105, (4, 8)), (1, 6)), jnp.uint8)
    texts = Texts(tokens, jnp.full(4, 16, jnp.int32))
    params = params_of(make_draft(config.draft, jnp.float32))
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    state = DraftState(params, draft_optimizer(config).init(params))
    chunk = jax.jit(make_chunk(config, target.config))
    seen = []
    for number in range(6):
        key = jax.random.fold_in(run_key(0), number)
        state, losses = chunk(state, weights, texts, key, np.float32(config.rate))
        seen.append(losses)
    assert seen[-1].total < 0.8 * seen[0].total
    assert seen[-1].cross_entropy < 0.8 * seen[0].cross_entropy
    assert seen[-1].chain > seen[0].chain


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_those_of_decoding_with_the_ring(kind, config_of, target, weights, text):
    config = config_of(kind)
    draft = config.draft
    shapes = params_of(make_draft(draft, jnp.float32))
    params = noisy(jax.tree.map(lambda x: x.astype(jnp.float32), shapes), 3)
    count = jax.jit(partial(accepted_counts, config, target.config))
    # A text that the draft agrees with in places: its own proposals, pasted in.
    tokens = jnp.asarray(text, jnp.int32)
    made, bundle = drafter_of(build_draft(draft, params, jnp.float32), draft, vocabulary_of(target))
    read = jax.jit(lambda t: read_texts(target, draft.taps, t, jnp.zeros(4, jnp.int32)).features)

    def proposals(tokens, at):
        state = made.init(4)
        where = jnp.full(4, at, jnp.int32)
        features = read(tokens)[:, :at]
        state = made.commit(bundle, state, features, jnp.zeros(4, jnp.int32), where)
        return made.propose(bundle, state, tokens[:, at], where, greedy(4)).tokens

    for at, kept in ((30, 3), (36, draft.length)):
        right = proposals(tokens, at)[:, :kept]
        tokens = tokens.at[:, at + 1 : at + 1 + kept].set(right)
    counts = np.asarray(count(weights, params, tokens.astype(jnp.uint8)))
    first = 48 // 2 - 1
    for at in (30, 36, 39):
        right = (
            np.asarray(proposals(tokens, at)) == np.asarray(tokens[:, at + 1 :])[:, : draft.length]
        )
        expected = np.cumprod(right, axis=1).sum(axis=1)
        np.testing.assert_array_equal(counts[:, at - first], expected)
    assert (counts[:, 36 - first] == draft.length).all()


def test_the_walk_takes_the_steps_of_decoding():
    counts = np.array([[2, 9, 9, 0, 1, 9], [0, 0, 0, 0, 0, 5]])
    accepted = walk(counts, 3)
    # First row: 2 accepted, then 0, then 1 beyond the end; second: five times 0, then 5.
    assert accepted.steps == 9
    assert accepted.length == pytest.approx((2 + 0 + 1 + 5) / 9 + 1)
    assert accepted.by_position == pytest.approx([3 / 9, 2 / 9, 1 / 9])


def test_labels_are_the_tokens_after_the_anchor(target, text):
    """Proposal n is for the token at anchor + 1 + n, of which the target spoke one row earlier."""
    tokens = jnp.asarray(text, jnp.int32)
    read = read_texts(target, (0, 1), tokens, jnp.zeros(4, jnp.int32))
    anchors = jnp.asarray([[3], [9], [20], [40]], jnp.int32)
    truth = block_truth(read, target, anchors, 3)
    logits = forward(target, tokens, mode="sparse")
    for row, at in enumerate((3, 9, 20, 40)):
        np.testing.assert_array_equal(truth.labels[row, 0], tokens[row, at + 1 : at + 4])
        np.testing.assert_array_equal(truth.previous[row, 0], tokens[row, at : at + 3])
        np.testing.assert_allclose(truth.target[row, 0], logits[row, at : at + 3], atol=1e-4)
    assert read.features.shape == (4, 48, 2 * SMALL.hidden_size)


def test_anchors_leave_room_for_their_labels(config_of):
    config = config_of("dspark", anchors=400, continued_share=0.5)
    prefix = jnp.asarray([5, 30, 47], jnp.int32)
    anchors = np.asarray(draw_anchors(config, prefix, 48, run_key(1)))
    assert anchors.min() >= 1
    assert anchors.max() == 48 - 1 - config.draft.length
    late = (anchors[1] >= 29).mean()
    assert 0.6 < late < 0.8  # half of them, and some of the others
    assert len(np.unique(anchors[0])) > 30


def test_evaluation_texts_are_pieces_of_the_files():
    files = {"a": b"x" * 100, "b": b"y" * 10}
    texts = evaluation_texts(files, context=32, stride=40, batch=3)
    assert texts.shape == (3, 32)
    assert texts[0, 0] == 0 and texts[0, 1] == ord("x")
    assert bytes(texts[2][:12]) == b"\0" + b"y" * 10 + b" "
    assert evaluation_texts(files, context=32, stride=40, batch=8).shape == (8, 32)


def test_the_rate_rises_and_falls():
    config = DraftTrainConfig(draft=bundled_draft("dflash", SMALL), rate=1.0, warmup=0.1)
    assert rate_at(config, 0.0) < 0.02
    assert rate_at(config, 0.1) > 0.9
    assert rate_at(config, 0.5) == pytest.approx(0.5)
    assert rate_at(config, 1.0) == pytest.approx(0.0, abs=1e-6)


def test_a_dflash2_may_begin_as_a_dflash(config_of):
    plain, more = (
        params_of(make_draft(config_of(kind).draft, jnp.float32, seed))
        for seed, kind in enumerate(("dflash", "dflash2"))
    )
    warm, start, fresh = flatten(warm_start(more, plain)), flatten(plain), flatten(more)
    assert warm.keys() == fresh.keys()
    for name, array in warm.items():
        np.testing.assert_array_equal(array, start.get(name, fresh[name]))
    with pytest.raises(UserError, match="no weights of the same names"):
        warm_start(more, {"fc": {"kernel": jnp.zeros((2, 2))}})


@pytest.mark.slow
def test_a_run_leaves_a_draft_and_a_record_and_goes_on(tmp_path, config_of, target, corpus):
    config = config_of("dflash2")
    data, out = tmp_path / "data.npz", tmp_path / "out"
    DraftTrainer(config, target, corpus, out, data).run()
    saved, params = load_own_draft(out / "checkpoint")
    assert saved == config.draft
    record = json.loads((out / "run.json").read_text())
    assert (record["kind"], record["steps"], record["continued"]) == ("dflash2", 4, 4)
    assert record["blocks"] == 2 * 4 * 8
    assert len(record["final"]["accept_by_position"]) == 7
    assert 1 <= record["final"]["accept_length"] <= 8
    assert record["parameters"] == sum(x.size for x in jax.tree.leaves(params))
    assert (out / f"state.{record['saves'] % 2}").is_dir()
    before = data.read_bytes()
    DraftTrainer(config, target, corpus, out, data).run()
    again = json.loads((out / "run.json").read_text())
    assert again["steps"] == 8
    assert len(again["curve"]) == 2 * len(record["curve"])
    assert data.read_bytes() == before
    # Killed while it saved: the state that the record names is still there.
    shutil.rmtree(out / f"state.{(again['saves'] + 1) % 2}")
    DraftTrainer(config, target, corpus, out, data).run()
    assert json.loads((out / "run.json").read_text())["steps"] == 12
    other = DraftTrainer(config_of("dspark"), target, corpus, out, data)
    with pytest.raises(UserError, match="holds a run of dflash2, not of dspark"):
        other.run()


def test_impossible_settings_are_refused(config_of, tmp_path, capsys):
    for changes, message in (
        ({"seconds": 10.0}, "leave no time"),
        ({"sequences": 5}, "do not split"),
        ({"context": 20}, "too short for blocks of 8"),
    ):
        with pytest.raises(UserError, match=message):
            config_of("dflash", **changes)
    code = main(["--draft", "dflash", "--out", str(tmp_path), "--corpus", str(tmp_path), "--smoke"])
    assert code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_bundled_drafts_fit_into_four_megabytes(kind):
    from dhisparse_jax.configs import TINY

    config = bundled_draft(kind, TINY)
    assert config.length == 7
    assert config.mask_token_id == 255
    assert config.taps == (2, 4, 6)
    size = sum(2 * leaf.size for leaf in jax.tree.leaves(abstract_draft(config)))
    assert 3e6 < size < 4.5e6  # before compression, which saves about a quarter
    assert dataclasses.replace(config).kind == kind
