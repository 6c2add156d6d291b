"""Published drafts: every tensor has its place, and what does not fit is refused in one line."""

import copy
import json

import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.errors import UserError
from dhisparse_jax.models.draft.block import Vocabulary, run_blocks
from dhisparse_jax.models.draft.checkpoint import build_draft
from dhisparse_jax.models.draft.hf import load_published_draft
from dhisparse_jax.models.draft.hf_config import default_taps, parse_draft_config
from dhisparse_jax.models.hf_config import parse_config
from tests.support.checkpoints import PUBLISHED
from tests.support.numpy_draft import NumpyDraft
from tests.support.published_drafts import (
    CONFIGS,
    DFLASH2,
    DSPARK,
    SPECULATORS,
    TOP,
    tensors,
    write_draft,
)

TARGET = parse_config(PUBLISHED)


def load(tmp_path, kind, **given):
    return load_published_draft(write_draft(tmp_path / "draft", kind, **given), TARGET)


def parsed(raw, **changes):
    raw = copy.deepcopy(raw)
    nested = changes.pop("nested", {})
    raw.update(changes)
    if nested:
        raw["dflash_config"] |= nested
    raw = {name: value for name, value in raw.items() if value is not ...}
    return parse_draft_config(raw, TARGET)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_published_draft_computes_what_its_tensors_say(tmp_path, kind):
    """Also through the prefix and the aliases that some releases use."""
    given = tensors(kind)
    loaded = load(tmp_path, kind)
    config = loaded.config
    assert config.anchor_first == (kind == "dspark")
    assert config.taps == (0, 2)
    assert config.windows == ((None, None) if kind == "speculators" else (6, None))
    assert config.causal == ((True, False) if kind == "dflash" else (False, False))
    shared = np.random.default_rng(5).normal(size=(2, 256, 32)).astype(np.float32)
    embedding, head = shared[0], shared[1].T
    if "speculators" in kind or kind == "dspark":
        np.testing.assert_array_equal(loaded.embedding, given["embed_tokens.weight"])
        np.testing.assert_array_equal(loaded.head, given["lm_head.weight"].T)
    else:
        assert loaded.embedding is None and loaded.head is None
    rng = np.random.default_rng(6)
    features = rng.normal(size=(1, 12, 64)).astype(np.float32)
    text = jnp.asarray(rng.integers(0, 255, (1, 12)), jnp.int32)
    vocabulary = Vocabulary(jnp.asarray(embedding), jnp.asarray(head))
    model = build_draft(config, loaded.params, jnp.float32)
    at = jnp.asarray([[9]], jnp.int32)
    rows = run_blocks(model, config, vocabulary, jnp.asarray(features), text, at)
    reference = NumpyDraft(config, given, embedding, head)
    expected, _ = reference.block(int(text[0, 9]), 9, features[0])
    np.testing.assert_allclose(rows.hidden[0, 0], np.stack(expected), atol=3e-4)
    names = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }
    renamed = {f"model.{names.get(n, n)}": array for n, array in given.items()}
    again = load(tmp_path, kind, arrays=renamed)
    np.testing.assert_array_equal(again.params["fc"]["kernel"], given["fc.weight"].T)
    np.testing.assert_array_equal(
        again.params["hidden_norm"]["weight"], given["hidden_norm.weight"]
    )


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("dflash", {"layers.2.mlp.up_proj.weight": (48, 32)}, "1 tensors too many: layers.2"),
        ("dflash", {"norm.weight": None}, r"lacks 1 tensors .*: norm.weight \[32\]"),
        ("dflash", {"mask_embedding": (32,)}, "too many: mask_embedding"),
        ("dflash", {"fc.weight": (64, 32)}, r"fc.weight is \[64, 32\], expected \[32, 64\]"),
        (
            "dflash",
            {"model.norm.weight": (32,)},
            "norm.weight is the same tensor as model.norm.weight",
        ),
        ("dflash2", {"candidate_selector.predecessor_codebook": None}, "lacks 1 tensors"),
        ("dspark", {"confidence_head.proj.bias": None}, "lacks 1 tensors .*: confidence_head"),
        ("dspark", {"lm_head.weight": (250, 32)}, "lm_head.weight is"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, kind, change, message):
    arrays = tensors(kind)
    for name, shape in change.items():
        if shape is None:
            del arrays[name]
        else:
            arrays[name] = np.zeros(shape, np.float32)
    with pytest.raises(UserError, match=message) as error:
        load(tmp_path, kind, arrays=arrays)
    assert "\n" not in str(error.value)


def test_a_dflash2_is_not_taken_for_a_dflash_and_the_other_way_round(tmp_path):
    with pytest.raises(UserError, match="tensors too many"):
        load(tmp_path, "dflash", arrays=tensors("dflash2"))
    with pytest.raises(UserError, match="lacks 11 tensors"):
        load(tmp_path, "dflash2", arrays=tensors("dflash"))


def test_a_learned_mask_is_not_left_out_silently(tmp_path):
    directory = write_draft(tmp_path / "draft", "dflash")
    (directory / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UserError, match="learned mask embedding"):
        load_published_draft(directory, TARGET)


@pytest.mark.parametrize(
    ("raw", "changes", "message"),
    [
        (TOP, {"architectures": ["Gemma4DSparkModel"]}, "architecture is 'Gemma4DSparkModel'"),
        (TOP, {"architectures": ...}, "architecture is None"),
        (TOP, {"dflash_config": {"target_layer_ids": [0, 2]}}, "no mask_token_id"),
        (TOP, {"nested": {"block_size": 8}}, "block_size is 4, but 8 in dflash_config"),
        (TOP, {"nested": {"target_layer_ids": [0, 3]}}, r"layers \[0, 3\]; a target of 3"),
        (TOP, {"nested": {"target_layer_ids": [-1]}}, "a target of 3 layers has 0 to 2"),
        (TOP, {"nested": {"target_layer_ids": [2, 2]}}, r"layers \[2, 2\], some twice"),
        (TOP, {"nested": {"target_layer_ids": 1}}, "expected a list of whole numbers"),
        (TOP, {"nested": {"mask_token_id": 256}}, "mask_token_id is 256"),
        (TOP, {"nested": {"attention_sink_bias": True}}, "attention_sink_bias"),
        (TOP, {"nested": {"causal": "no"}}, "causal is 'no'"),
        (TOP, {"sliding_window": None}, "sliding_window is None"),
        (TOP, {"layer_types": ["sliding_attention"]}, "2 layers, but 1 windows"),
        (TOP, {"layer_types": ["linear", "full_attention"]}, "layer_types"),
        (TOP, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        (TOP, {"rope_scaling": {"type": "linear"}}, "rope_scaling"),
        (TOP, {"attention_bias": True}, "attention_bias"),
        (TOP, {"hidden_size": ...}, "hidden_size is None"),
        (TOP, {"num_key_value_heads": 3}, "do not fit 3 key heads"),
        (TOP, {"block_size": 1}, "proposes nothing"),
        (TOP, {"dtype": "float8"}, "float8"),
        (DFLASH2, {"nested": {"selector_top_k": 300}}, "selector_top_k is 300"),
        (DFLASH2, {"nested": {"conv_group_size": 5}}, "not a multiple of conv_group_size 5"),
        (DSPARK, {"markov_head_type": "gru"}, "markov_head_type is 'gru'"),
        (DSPARK, {"markov_rank": 0}, "markov_rank is 0"),
        (SPECULATORS, {"draft_vocab_size": 128}, "128 of the target's 256"),
        (SPECULATORS, {"speculators_config": None}, "must say sample_from_anchor"),
        (SPECULATORS, {"speculators_model_type": "eagle3"}, "architecture is 'eagle3'"),
        (SPECULATORS, {"transformer_layer_config": 3}, "expected an object"),
    ],
)
def test_unsupported_configurations_are_refused(raw, changes, message):
    with pytest.raises(UserError, match=message) as error:
        parsed(raw, **changes)
    assert "\n" not in str(error.value)


def test_the_trained_mask_is_read_and_never_assumed():
    """Explicit, then DFlash's own, then the older rule; windows from either of their places."""
    assert parsed(TOP).causal == (True, False)
    assert parsed(TOP, nested={"causal": False}).causal == (False, False)
    assert parsed(TOP, is_causal=True, nested={"causal": False}).causal == (True, True)
    assert parsed(TOP, layer_types=...).windows == (None, None)
    assert parsed(TOP, layer_types=..., use_sliding_window=True).windows == (6, 6)
    swa = {"use_swa": True, "swa_window_size": 9}
    assert parsed(TOP, layer_types=..., nested=swa).windows == (9, 9)
    assert parsed(DSPARK).causal == (False, False)


def test_layouts_of_dspark():
    """Native: the anchor proposes. Speculators' 1 + N: it does not; both are said or derived."""
    assert (parsed(DSPARK).anchor_first, parsed(DSPARK).length) == (True, 4)
    assert (parsed(SPECULATORS).anchor_first, parsed(SPECULATORS).length) == (False, 3)
    said = parsed(SPECULATORS, speculators_config=None, sample_from_anchor=True)
    assert (said.anchor_first, said.length) == (True, 4)
    plain = parsed(DSPARK, markov_rank=0, enable_confidence_head=False)
    assert (plain.kind, plain.anchor_first) == ("dflash", True)
    assert not parsed(TOP).anchor_first
    with pytest.raises(UserError, match="sample_from_anchor is 1"):
        parsed(DSPARK, sample_from_anchor=1)


def test_taps_that_are_left_out_follow_the_published_rule():
    assert default_taps(5, 36) == (1, 9, 17, 25, 33)
    assert default_taps(5, 40) == (1, 10, 19, 28, 37)
    assert default_taps(5, 64) == (1, 16, 31, 46, 61)
    assert default_taps(1, 36) == (18,)


def test_entries_are_found_in_either_place():
    nested = {name: TOP[name] for name in ("block_size", "num_target_layers")}
    moved = json.loads(json.dumps(TOP))
    for name in nested:
        del moved[name]
    moved["dflash_config"] |= nested
    assert parse_draft_config(moved, TARGET) == parsed(TOP)
