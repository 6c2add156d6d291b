"""Drafters in checkpoints of their targets: sizes, names, quantised tensors, conversion, damage."""

import dataclasses
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dhisparse_jax.configs import DEEPSEEK_V4_1_FLASH, DEEPSEEK_V4_FLASH
from dhisparse_jax.configs.attached import AttachedConfig
from dhisparse_jax.configs.quantised import FORMATS
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.attached.hf_config import parse_attached
from dhisparse_jax.models.attached.hf_tensors import attached_shapes
from dhisparse_jax.models.attached.load import attached_tensors, is_attached, load_attached
from dhisparse_jax.models.deepseek_v41.hf_tensors import published_v41_shapes
from dhisparse_jax.models.draft.registry import load_draft
from dhisparse_jax.models.params import flatten, params_of
from dhisparse_jax.models.registry import load
from tests.support import small_v4, small_v41
from tests.support.quantised import exact, quantise, write_tensors
from tests.support.small_attached import V4_RAW, drafter, v4_tensors

FLASH = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0],
}
V41 = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
}
STORED = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3", "main_proj")
"""Matrices that are released quantised."""


@pytest.fixture(scope="module")
def tensors():
    return load_file(small_v41.FIXTURE / "model.safetensors")


@pytest.fixture(scope="module")
def served():
    return load(str(small_v41.FIXTURE))


@pytest.fixture(scope="module")
def v4_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("v4")
    (folder / "config.json").write_text(json.dumps(V4_RAW))
    own = load_file(small_v4.FIXTURE / "model.safetensors")
    write_tensors(folder / "model.safetensors", own | v4_tensors())
    return folder


def write(folder, tensors, changes=(), **more):
    """The small V4.1 with other tensors and entries; an entry that is None is left out."""
    text = {k: v for k, v in (small_v41.TEXT | dict(changes)).items() if v is not None}
    raw = small_v41.RAW | {"text_config": text} | more
    (folder / "config.json").write_text(json.dumps(raw))
    write_tensors(folder / "model.safetensors", tensors)
    shutil.copyfile(small_v41.FIXTURE / "tokenizer.json", folder / "tokenizer.json")


def is_stored(name):
    return name.endswith(".weight") and name.split(".")[-2] in STORED


def same(one, other):
    flat, others = flatten(params_of(one)), flatten(params_of(other))
    assert flat.keys() == others.keys()
    for name, leaf in flat.items():
        assert np.array_equal(np.asarray(leaf), np.asarray(others[name])), name


def test_released_drafters_have_the_published_tensors():
    """4,705 of DeepSeek-V4-Flash; 763 billion numbers of V4.1 with its tables and its drafter."""
    found = parse_attached(FLASH, DEEPSEEK_V4_FLASH, 3)
    assert found == AttachedConfig(
        stages=3,
        block_size=5,
        noise_token_id=128799,
        taps=(40, 41, 42),
        markov_rank=256,
        num_experts=256,
        experts_per_token=6,
    )
    shapes = attached_shapes(found, DEEPSEEK_V4_FLASH)
    assert len(shapes) + sum(map(is_stored, shapes)) == 4705
    assert shapes["mtp.0.main_proj.weight"] == (4096, 12288)
    assert shapes["mtp.2.confidence_head.proj.weight"] == (1, 4096 + 256)
    assert shapes["mtp.2.hc_head_fn"] == (4, 4 * 4096)
    found = parse_attached(V41, DEEPSEEK_V4_1_FLASH, 3)
    assert (found.num_experts, found.experts_per_token) == (128, 3)
    shapes = attached_shapes(found, DEEPSEEK_V4_1_FLASH)
    assert not any("hc_head" in name for name in shapes)
    count = lambda shapes: sum(map(math.prod, shapes.values()))
    assert round((count(shapes) + count(published_v41_shapes(DEEPSEEK_V4_1_FLASH))) / 1e9) == 763
    renamed = {name: V41[name] for name in V41 if name != "dspark_num_experts_per_tok"}
    renamed |= {"dspark_n_activated_experts": 3}
    assert parse_attached(renamed, DEEPSEEK_V4_1_FLASH, 3) == found


def test_every_tensor_of_a_drafter_is_used(v4_folder, tensors):
    loaded = load(str(v4_folder))
    assert is_attached(v4_folder)
    assert sorted(loaded.drafts) == sorted(v4_tensors())
    assert loaded.unused == ()
    own, params = load_draft("dspark", loaded)
    assert (own.length, own.taps, own.window) == (5, (0, 2, 4), 5)
    expected, given = drafter("v4")
    assert own == expected
    leaves = zip(*(jax.tree.leaves(weights["draft"]) for weights in (params, given)), strict=True)
    assert all(np.array_equal(one, other) for one, other in leaves)
    assert not is_attached(small_v4.FIXTURE)


def test_all_names_that_are_used_load_the_same_drafter(tmp_path, tensors):
    """DeepSeek-V4's names of the heads for V4.1, and a prefix as transformers writes it."""
    expected = load_attached(small_v41.FIXTURE, small_v41.model()[0].config).model
    names = {
        "markov_head.embed": "markov_head.markov_w1",
        "markov_head.head": "markov_head.markov_w2",
    }
    renamed = dict(tensors)
    for name in [name for name in tensors if name.startswith("mtp.")]:
        other = name
        for old, new in names.items():
            other = other.replace(old, new)
        renamed[f"model.{other}"] = renamed.pop(name)
    write(tmp_path, renamed)
    same(load_attached(tmp_path, small_v41.model()[0].config).model, expected)
    drafts = attached_tensors(tmp_path, renamed)
    assert len(drafts) == 72
    assert "model.mtp.0.ffn.gate.bias_vl" not in drafts


@pytest.mark.parametrize(
    ("form", "block"),
    [
        ("fp8-e8m0-32", 32),
        pytest.param("fp8-e8m0", 128, marks=pytest.mark.slow),
        pytest.param("fp8", 128, marks=pytest.mark.slow),
    ],
)
def test_quantised_tensors_are_what_they_stand_for(tmp_path, tensors, form, block):
    """As released: matrices of 8 bits in blocks, experts of 4 bits that stay so."""
    target = dataclasses.replace(
        small_v41.model()[0].config, hidden_size=64, expert_intermediate_size=32
    )
    changes = {"hidden_size": 64, "moe_intermediate_size": 32}
    shapes = attached_shapes(parse_attached(small_v41.RAW, target, 2), target)
    rng, stored, plain = np.random.default_rng(0), {}, {}
    for name, shape in shapes.items():
        values = (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
        stored[name] = plain[name] = values
        if is_stored(name):
            weights = FORMATS["fp4" if ".experts." in name else form]
            stored[name], scales = quantise(values, weights)
            suffix = "_scale_inv" if form == "fp8" else ""  # of each of the two styles
            scale = f"{name}{suffix}" if suffix else f"{name.removesuffix('.weight')}.scale"
            stored[scale] = scales
            plain[name] = exact(stored[name], scales, weights).astype(np.float32)
    folders = [tmp_path / "stored", tmp_path / "plain"]
    entry = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [block, block]}}
    for folder, held, more in zip(folders, (stored, plain), (entry, {}), strict=True):
        folder.mkdir()
        write(folder, held, changes, **more)
    expected = load_attached(folders[1], target).model
    config, kept = load_attached(folders[0], target)
    assert config.expert_format == "fp4"
    same(load_attached(folders[0], target, stored_experts=False).model, expected)
    x, tokens = jnp.asarray(rng.normal(size=(1, 3, 64)), jnp.float32), jnp.zeros((1, 3), jnp.int32)
    ours, mine = (model.stages[1].mlp(x, tokens) for model in (kept, expected))
    assert np.abs(ours - mine).max() < 1e-5


def test_a_drafter_of_another_checkpoint_and_names_that_are_none(tmp_path, served):
    loaded = load(str(small_v4.FIXTURE))
    with pytest.raises(UserError, match="has no draft attached: it has no dspark entries"):
        load_draft("dspark", loaded)
    with pytest.raises(UserError, match="unknown draft dflash2: neither dspark"):
        load_draft("dflash2", loaded)
    (tmp_path / "config.json").write_text(json.dumps(V4_RAW))
    write_tensors(tmp_path / "model.safetensors", v4_tensors())
    own, _ = load_draft(str(tmp_path), loaded)
    assert own == drafter("v4")[0]
    with pytest.raises(UserError, match="draft length 6 is not possible: this draft proposes 1 to"):
        load_draft(str(tmp_path), loaded, 6)
    with pytest.raises(UserError, match="noise token is 95, but the vocabulary has 87"):
        load_draft(str(tmp_path), served)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dspark_target_layer_ids": [3, 6]}, r"reads layer 6 of the target, .* 6 layers"),
        ({"dspark_target_layer_ids": None}, "dspark_target_layer_ids is None, expected a list"),
        ({"dspark_target_layer_ids": [3, 3]}, r"reads layers \[3, 3\]; name each once"),
        (
            {"dspark_target_layer_ids": [3]},
            r"mtp.0.main_proj.weight is \[32, 64\], expected \[32, 32\]",
        ),
        ({"dspark_noise_token_id": None}, "dspark_noise_token_id is None, expected a whole number"),
        ({"dspark_noise_token_id": 87}, "noise token is 87, but the vocabulary has 87"),
        ({"dspark_block_size": 0}, "block_size is 0; it must be positive"),
        ({"dspark_block_size": "4"}, "dspark_block_size is '4', expected a whole number"),
        ({"dspark_markov_rank": 7}, r"markov_head.embed.weight is|markov_w1.weight is"),
        (
            {"dspark_markov_head_type": "gated"},
            "dspark_markov_head_type is 'gated'; only 'vanilla'",
        ),
        ({"dspark_temperature": 0.5}, "unknown entries .* dspark_temperature"),
        ({"dspark_n_routed_experts": 5}, "mtp.0.ffn.gate.weight is"),
        (
            {"dspark_num_experts_per_tok": 5},
            "experts_per_token 5 of the draft exceeds its 4 experts",
        ),
        ({"compress_ratios": [0, 3, 3, 1, 1, 1, 0, 3]}, "gives layers of the draft entries"),
    ],
)
def test_a_drafter_that_does_not_fit_is_one_line(tmp_path, tensors, served, changes, message):
    write(tmp_path, tensors, changes)
    loaded = dataclasses.replace(served, directory=tmp_path)
    with pytest.raises(UserError, match=message) as raised:
        load_draft("dspark", loaded)
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith("; --draft none runs without it")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("mtp.1.norm.weight"), r"lacks 1 tensors .*mtp.1.norm.weight"),
        (
            lambda t: t.update({"mtp.1.attn.indexer.wk.weight": t["norm.weight"]}),
            "1 tensors too many: mtp.1.attn.indexer.wk.weight",
        ),
        (lambda t: t.update({"mtp.0.e_proj.weight": t["norm.weight"]}), "too many: mtp.0.e_proj"),
        (
            lambda t: t.update({"mtp.0.attn.attn_sink": np.ones(4, np.int32)}),
            "mtp.0.attn.attn_sink is I32",
        ),
        (lambda t: [t.pop(n) for n in list(t) if n.startswith("mtp.1.")], r"lacks \d+ tensors"),
        (
            lambda t: [t.pop(n) for n in list(t) if n.startswith("mtp.")],
            "has no draft attached: it has no mtp tensors",
        ),
    ],
)
def test_damage_is_named(tmp_path, tensors, change, message):
    damaged = dict(tensors)
    change(damaged)
    write(tmp_path, damaged)
    with pytest.raises(UserError, match=message) as raised:
        load_attached(tmp_path, small_v41.model()[0].config)
    assert "\n" not in str(raised.value)
