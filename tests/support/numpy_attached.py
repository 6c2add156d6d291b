"""The drafter in a DeepSeek-V4 or V4.1 checkpoint in float64 NumPy, from its formulas.

One block of one request, over the features of the whole text before it; no ring. Weights have the
names and shapes of DeepSeek-V4-Flash-DSpark, sizes those of the published configuration.
"""

from typing import NamedTuple

import numpy as np

from tests.support import numpy_v41 as v41


class Proposed(NamedTuple):
    """What a block says.

    Attributes:
        tokens: the best ones, each after the one before it.
        logits: of every row, given the token before it.
        confidence: chance that each is accepted.
        margin: how far the closest choice of a token or of experts is from another one.
    """

    tokens: list[int]
    logits: np.ndarray
    confidence: np.ndarray
    margin: float


def propose(config, weights, features, anchor, *, stages, own_sites):
    """Args:
    config: sizes; entries of the drafter win over those of the target.
    weights: of the target and of the drafter, float64.
    features: [S, taps * width] of positions 0 .. S - 1.
    anchor: token at position S.
    stages: layers.
    own_sites: whether connections weight their own sublayer's input (V4), not the next one's.
    """
    w = lambda name: weights[f"mtp.{name}"]
    last, eps, margins = stages - 1, config["rms_norm_eps"], []
    sizes = config | {
        "num_experts_per_tok": config.get(
            "dspark_num_experts_per_tok", config["num_experts_per_tok"]
        )
    }
    read = v41.rms(features @ w("0.main_proj.weight").T, w("0.main_norm.weight"), eps)
    count = config["dspark_block_size"]
    ids = [anchor] + [config["dspark_noise_token_id"]] * (count - 1)
    x = np.repeat(weights["embed.weight"][ids][:, None], config["hc_mult"], axis=1)
    pre = np.zeros((count, config["hc_mult"]))
    pre[:, 0] = 1.0
    for stage in range(stages):
        own = {
            name.removeprefix(f"mtp.{stage}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"mtp.{stage}.")
        }
        for site in ("attn", "ffn"):
            here, post, carry = v41.connection(config, own, site, x)
            given = v41.collapse(x, here if own_sites else pre)
            given = v41.rms(given, own[f"{site}_norm.weight"], eps)
            if site == "attn":
                update = attention(config, own, given, read, own_sites)
            else:
                update, _ = v41.moe(sizes, own, given, {"margins": margins})
            x, pre = v41.connect(x, update, post, carry), here
    hidden = v41.collapse(x, stream_weights(config, w, last, x) if own_sites else pre)
    unary = v41.rms(hidden, w(f"{last}.norm.weight"), eps) @ weights["head.weight"].T
    return walk(w, last, hidden, unary, anchor, margins)


def attention(config, w, x, read, own_sites):
    """Rows see the newest positions, all of them the same ones, and each other."""
    heads, dim, rope = (config[k] for k in ("num_attention_heads", "head_dim", "qk_rope_head_dim"))
    eps, count = config["rms_norm_eps"], len(x)
    turn = lambda v, at: v41.rotate_last(v, at, rope, v41.frequencies(config, False))
    keys = lambda v, at: turn(
        v41.rms(v @ w["attn.wkv.weight"].T, w["attn.kv_norm.weight"], eps), at
    )
    at = len(read) + np.arange(count)
    latent = v41.rms(x @ w["attn.wq_a.weight"].T, w["attn.q_norm.weight"], eps)
    query = (latent @ w["attn.wq_b.weight"].T).reshape(count, heads, dim)
    if own_sites:
        query = v41.rms(query, 1.0, eps)
    query = turn(query, at[:, None])
    newest = slice(max(0, len(read) - config["sliding_window"]), len(read))
    rows = np.concatenate([keys(read[newest], np.arange(len(read))[newest]), keys(x, at)])
    logits = np.einsum("bhd,kd->bhk", query, rows) * dim**-0.5
    out = np.stack([v41.with_sink(row, w["attn.attn_sink"]) @ rows for row in logits])
    out = turn(out, -at[:, None]).reshape(count, config["o_groups"], -1)
    first = w["attn.wo_a.weight"].reshape(config["o_groups"], config["o_lora_rank"], -1)
    return np.einsum("sgi,goi->sgo", out, first).reshape(count, -1) @ w["attn.wo_b.weight"].T


def stream_weights(config, w, last, x):
    """Weights of the streams after the last stage, from all of them."""
    flat = v41.rms(x.reshape(len(x), -1), 1.0, config["rms_norm_eps"])
    mix = flat @ w(f"{last}.hc_head_fn").T * w(f"{last}.hc_head_scale")
    return v41.sigmoid(mix + w(f"{last}.hc_head_base")) + config["hc_eps"]


def walk(w, last, hidden, unary, anchor, margins):
    """One token after the other, by logits that know the one before; hidden is before the norm."""
    tokens, rows, chances = [anchor], [], []
    for here, base in zip(hidden, unary, strict=True):
        known = w(f"{last}.markov_head.markov_w1.weight")[tokens[-1]]
        rows.append(base + w(f"{last}.markov_head.markov_w2.weight") @ known)
        both = np.concatenate([here, known])
        chances.append(v41.sigmoid(w(f"{last}.confidence_head.proj.weight")[0] @ both))
        best = np.sort(rows[-1])
        margins.append(best[-1] - best[-2])
        tokens.append(int(rows[-1].argmax()))
    return Proposed(tokens[1:], np.stack(rows), np.array(chances), min(margins))
