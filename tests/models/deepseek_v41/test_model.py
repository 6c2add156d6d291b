"""Every part of the model against its formula in float64, and all of them together."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.configs import DEEPSEEK_V4_1_FLASH
from dhisparse_jax.models.deepseek_v41.ngrams import multipliers_of, table_rows
from dhisparse_jax.models.deepseek_v41.streams import Carried, packed, unpacked
from tests.support import numpy_v41
from tests.support.small_v41 import (
    LOGITS,
    TEXT,
    TOKENS,
    dense,
    layer_weights,
    loaded,
    weights,
)

COUNT = 24
POSITIONS = jnp.arange(COUNT, dtype=jnp.int32)[None]


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_near(found, expected, tolerance=2e-6):
    scale = max(1.0, float(np.abs(expected).max()))
    assert np.abs(np.asarray(found) - expected).max() < tolerance * scale


@cache
def oracle():
    words = np.asarray(loaded().word_of[...]).tolist()
    return numpy_v41.model(TEXT, weights(), TOKENS.tolist(), words)


@cache
def run():
    return dense(TOKENS)


def test_the_stored_logits_are_those_of_the_numpy_model():
    assert np.abs(oracle().logits - LOGITS).max() < 1e-6


def test_logits():
    assert np.abs(run()[0] - LOGITS).max() < 2e-5


def test_selections_and_candidates():
    _, selections, blocks = run()
    for found, (layer, expected) in zip(selections, oracle().selected.items(), strict=True):
        for row, mine in zip(found, expected, strict=True):
            assert row[row >= 0].tolist() == mine.tolist(), layer
    assert blocks.shape[1] == TEXT["candidate_topk_blocks"] < oracle().blocks.shape[1]
    for found, mine in zip(blocks, oracle().blocks, strict=True):
        assert found[found >= 0].tolist() == np.flatnonzero(mine).tolist()


@pytest.mark.parametrize("site", ["attn", "ffn"])
def test_connections(site):
    x = draw(COUNT, TEXT["hc_mult"], TEXT["hidden_size"])
    block = loaded().layers[2]
    hyper = block.attention_hyper if site == "attn" else block.mlp_hyper
    expected = numpy_v41.connection(TEXT, layer_weights(2), site, x.astype(np.float64))
    for found, mine in zip(hyper.mixing(jnp.asarray(x)), expected, strict=True):
        assert_near(found, mine)


def test_the_weights_of_the_streams_go_from_group_to_group_unchanged():
    carried = Carried(jnp.asarray(draw(2, 3, 4, 8)), jnp.asarray(draw(2, 3, 4, seed=1)))
    for mine, back in zip(carried, unpacked(packed(carried), 4), strict=True):
        assert np.array_equal(mine, back)
    narrow = carried._replace(streams=carried.streams.astype(jnp.bfloat16))
    back = unpacked(packed(narrow), 4)
    assert np.array_equal(back.streams, narrow.streams)
    assert np.abs(back.pre - carried.pre).max() < 2**-15 * np.abs(carried.pre).max()


@pytest.mark.parametrize("layer", [1, 3])
def test_entries_and_index_keys(layer):
    """Of 3 positions and of one; the key comes from the latent before it is rotated."""
    x, w = draw(1, COUNT, TEXT["hidden_size"]), layer_weights(layer)
    source, rate = loaded().layers[layer].attention.source, TEXT["compress_ratios"][layer]
    entry = jnp.arange(COUNT // rate, dtype=jnp.int32)[None]
    if rate > 1:
        raw = source.latents.raw(jnp.asarray(x)).reshape(1, COUNT // rate, rate, -1)
        latents = source.latents.of_stretches(raw, jnp.ones(raw.shape[:-1], bool))
    else:
        latents = source.latents.of_tokens(jnp.asarray(x))
    expected = numpy_v41.latents(TEXT, w, rate, x[0].astype(np.float64))
    assert_near(latents[0], expected)
    at, f = rate * np.arange(COUNT // rate), numpy_v41.frequencies(TEXT, True)
    turn = lambda v: numpy_v41.rotate_last(v, at, TEXT["qk_rope_head_dim"], f)
    assert_near(source.entries(latents, entry)[0], turn(expected), 2e-5)
    keys = expected @ w["attn.indexer.wk.weight"].T
    keys = numpy_v41.rms(keys, w["attn.indexer.k_norm.weight"], TEXT["rms_norm_eps"])
    assert_near(source.keys(latents, entry)[0], turn(keys), 2e-5)


def test_queries_of_heads_are_not_normalised():
    x, attention = draw(1, COUNT, TEXT["hidden_size"]), loaded().layers[2].attention
    w, heads = layer_weights(2), TEXT["num_attention_heads"]
    latent = numpy_v41.rms(
        x[0] @ w["attn.wq_a.weight"].T, w["attn.q_norm.weight"], TEXT["rms_norm_eps"]
    )
    query = (latent @ w["attn.wq_b.weight"].T).reshape(COUNT, heads, -1)
    at, f = np.arange(COUNT)[:, None], numpy_v41.frequencies(TEXT, True)
    expected = numpy_v41.rotate_last(query, at, TEXT["qk_rope_head_dim"], f)
    assert_near(attention.project(jnp.asarray(x), POSITIONS).query[0], expected, 2e-5)


def test_experts():
    x, w = draw(COUNT, TEXT["hidden_size"]), layer_weights(4)
    expected, _ = numpy_v41.moe(TEXT, w, x.astype(np.float64), {"margins": []})
    found = loaded().layers[4].mlp(jnp.asarray(x)[None], jnp.zeros((1, COUNT), jnp.int32))
    assert_near(found[0], expected)


@pytest.mark.parametrize("layer", TEXT["engram_layer_ids"])
def test_memory(layer):
    x = draw(COUNT, TEXT["hc_mult"], TEXT["hidden_size"])
    words = np.random.default_rng(layer).integers(0, 50, (COUNT, TEXT["engram_max_ngram_size"]))
    expected = x + numpy_v41.engram(TEXT, layer_weights(layer), layer, x, words)
    found = loaded().layers[layer].engram(jnp.asarray(x), jnp.asarray(words, jnp.int32))
    assert_near(found, expected)


def test_words_before_a_text_are_the_pad():
    model, at = loaded(), jnp.asarray([[[1, 0, -1]]], jnp.int32)
    found = model.words(jnp.asarray([[[7, 8, 9]]], jnp.int32), at >= 0)
    words = np.asarray(model.word_of[...])
    assert found.tolist() == [[[words[7], words[8], words[TEXT["engram_pad_token_id"]]]]]


def test_rows_of_tables_have_64_bits_on_the_way():
    """With the sizes of the released model, against whole numbers without a limit."""
    config = DEEPSEEK_V4_1_FLASH
    raw = {
        "engram_layer_ids": list(config.engram_layers),
        "engram_n_heads": config.engram_heads,
        "engram_max_ngram_size": config.engram_order,
        "engram_vocab_size": config.engram_buckets,
        "engram_compressed_vocab_size": config.engram_vocab,
    }
    words = np.random.default_rng(0).integers(0, config.engram_vocab, (40, config.engram_order))
    words[0], words[1] = 0, config.engram_vocab - 1
    for layer, primes in zip(config.engram_layers, config.engram_primes(), strict=True):
        numbers = multipliers_of(layer, config.engram_order, config.engram_vocab)
        found = table_rows(jnp.asarray(words, jnp.int32), numbers, primes)
        assert found.tolist() == [numpy_v41.ngram_rows(raw, layer, row) for row in words]
        assert found.max() < sum(primes)
