"""A model out of a GGUF file: its logits are those of transformers, which read the same file."""

import numpy as np
import pytest

from dhisparse_jax.configs.llama import LlamaConfig, grouped
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.llama.attend import causal
from dhisparse_jax.models.llama.load import config_of_fields, load_gguf, model_of, packaged
from dhisparse_jax.models.llama.whole import run_layers
from dhisparse_jax.models.llama.words import words_of
from tests.support.small_llama import case, fields, model, tensors, tokens


def test_logits_are_those_of_transformers():
    seen = causal(len(tokens()))
    logits = model().logits(run_layers(model(), tokens(), lambda view: seen))
    np.testing.assert_allclose(logits, case()["logits"], rtol=0, atol=1e-4)


def test_sizes_are_those_of_the_file():
    config = model().config
    assert isinstance(config, LlamaConfig)
    assert (config.rope_theta, config.num_kv_heads, config.head_dim) == (5000.0, 2, 16)
    assert config.norm_eps == pytest.approx(1e-4)
    assert grouped(8, 3) == (3, 3, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "gemma"}, "only 'llama'"),
        ({"llama.rope.scaling.type": "yarn"}, "scaled"),
        ({"llama.rope.dimension_count": 8}, "8 of 16 channels"),
        ({"llama.attention.head_count_kv": 3}, "do not divide"),
    ],
)
def test_other_models_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        config_of_fields(fields() | change, tied=True)


def test_what_is_missing_is_named():
    without = {name: each for name, each in fields().items() if name != "llama.block_count"}
    with pytest.raises(UserError, match=r"lacks llama\.block_count"):
        config_of_fields(without, tied=True)
    config = config_of_fields(fields(), tied=True)
    partly = {name: each for name, each in tensors().items() if name != "blk.1.attn_k"}
    with pytest.raises(UserError, match=r"missing: blk\.1\.attn_k"):
        model_of(config, partly)
    with pytest.raises(UserError, match=r"unknown: rope_freqs"):
        model_of(config, tensors() | {"rope_freqs": np.zeros(4, np.float32)})
    with pytest.raises(UserError, match=r"blk\.0\.ffn_up is"):
        model_of(config, tensors() | {"blk.0.ffn_up": np.zeros((4, 4), np.float32)})


def test_a_package_that_is_not_known_is_refused(tmp_path):
    with pytest.raises(UserError, match="smollm2"):
        packaged("other")
    with pytest.raises(UserError, match=r"gguf"):
        load_gguf(tmp_path / "none.gguf")


def test_words_are_merged_and_digits_are_single():
    pytest.importorskip("tokenizers")
    words = words_of(fields())
    names = fields()["tokenizer.ggml.tokens"]
    found = [names[token] for token in words.encode("the the 42<|end|>he")]
    assert found == ["t", "he", "Ġthe", "Ġ", "4", "2", "<|end|>", "he"]
    assert words.decode(words.encode("the the 42<|end|>he")) == "the the 42<|end|>he"


def test_other_tokenizers_are_refused():
    pytest.importorskip("tokenizers")
    with pytest.raises(UserError, match="only"):
        words_of(fields() | {"tokenizer.ggml.pre": "qwen2"})
    with pytest.raises(UserError, match="puts something before"):
        words_of(fields() | {"tokenizer.ggml.add_bos_token": True})
