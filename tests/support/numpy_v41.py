"""DeepSeek-V4.1 in float64 NumPy, from its formulas: one text at a time, no cache, no library.

Weights have the names and shapes of a published checkpoint, sizes those of its configuration.
Every function is one formula. Positions go first, then streams or heads, then channels.
"""

import math
import unicodedata
from typing import NamedTuple

import numpy as np


class Trace(NamedTuple):
    """What the model computed on the way.

    Attributes:
        logits: [S, vocabulary].
        selected: entries of every query, ascending, by layer that selects.
        blocks: which blocks the candidate source leaves, [S, blocks].
        experts: experts of every token, ascending, by layer.
        margins: of every choice of entries, blocks and experts, how far it is from another one.
        features: of every layer the mean of the streams before its attention, [layers, S, width].
    """

    logits: np.ndarray
    selected: dict[int, list[np.ndarray]]
    blocks: np.ndarray | None
    experts: list[np.ndarray]
    margins: list[float]
    features: list[np.ndarray]


def model(config, weights, tokens, word_of=None):
    """All layers over a text."""
    trace = Trace(None, {}, None, [], [], [])
    shared = {"margins": trace.margins}
    x = np.repeat(weights["embed.weight"][tokens][:, None], config["hc_mult"], axis=1)
    pre = np.zeros((len(tokens), config["hc_mult"]))
    pre[:, 0] = 1.0
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        w = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        if layer in config["engram_layer_ids"]:
            x = x + engram(config, w, layer, x, ngram_words(config, tokens, word_of))
        trace.features.append(x.mean(1))
        norm = lambda h, name, w=w: rms(h, w[name], config["rms_norm_eps"])
        after, post, carry = connection(config, w, "attn", x)
        update = attention(config, w, layer, norm(collapse(x, pre), "attn_norm.weight"), shared)
        x, pre = connect(x, update, post, carry), after
        after, post, carry = connection(config, w, "ffn", x)
        update, experts = moe(config, w, norm(collapse(x, pre), "ffn_norm.weight"), shared)
        x, pre = connect(x, update, post, carry), after
        trace.experts.append(experts)
        if "selected" in shared and layer in config["index_source_layer_ids"]:
            trace.selected[layer] = shared["selected"]
    last = rms(collapse(x, pre), weights["norm.weight"], config["rms_norm_eps"])
    return trace._replace(logits=last @ weights["head.weight"].T, blocks=shared.get("blocks"))


def rms(x, weight, eps):
    """Root mean square norm."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def collapse(x, pre):
    """sum_j pre_j X_j."""
    return np.einsum("sj,sjd->sd", pre, x)


def connect(x, update, post, carry):
    """X_k <- post_k y + sum_j C[j, k] X_j."""
    return post[:, :, None] * update[:, None] + np.einsum("sjk,sjd->skd", carry, x)


def connection(config, w, site, x):
    """What the streams before a sublayer say: pre for the next one, post and C for this one."""
    n, eps = config["hc_mult"], config["hc_eps"]
    flat = x.reshape(len(x), -1)
    flat = flat / np.sqrt((flat**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
    mix, base = flat @ w[f"hc_{site}_fn"].T, w[f"hc_{site}_base"]
    scale = w[f"hc_{site}_scale"]
    pre = sigmoid(mix[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * sigmoid(mix[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    carry = softmax((mix[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)) + eps
    carry = carry / (carry.sum(1, keepdims=True) + eps)
    for _ in range(config["hc_sinkhorn_iters"] - 1):
        carry = carry / (carry.sum(2, keepdims=True) + eps)
        carry = carry / (carry.sum(1, keepdims=True) + eps)
    return pre, post, carry


def attention(config, w, layer, x, shared):
    """A window and selected entries, attended to together; sinks take weight and give nothing."""
    heads, dim, rope = (config[k] for k in ("num_attention_heads", "head_dim", "qk_rope_head_dim"))
    eps, count, rate = config["rms_norm_eps"], len(x), config["compress_ratios"][layer]
    turn = lambda v, at: rotate_last(v, at, rope, frequencies(config, rate > 0))
    at = np.arange(count)
    latent = rms(x @ w["attn.wq_a.weight"].T, w["attn.q_norm.weight"], eps)
    query = turn((latent @ w["attn.wq_b.weight"].T).reshape(count, heads, dim), at[:, None])
    row = turn(rms(x @ w["attn.wkv.weight"].T, w["attn.kv_norm.weight"], eps), at)
    if layer in config["kv_source_layer_ids"]:
        pooled = latents(config, w, rate, x)
        first = rate * np.arange(len(pooled))
        keys = rms(pooled @ w["attn.indexer.wk.weight"].T, w["attn.indexer.k_norm.weight"], eps)
        shared |= {"entries": turn(pooled, first), "keys": turn(keys, first)}
    if layer in config["index_source_layer_ids"]:
        scores = index_scores(config, w, x, latent, turn, rate, shared["keys"])
        shared["selected"] = select(config, layer, scores, shared)
    out = np.zeros((count, heads, dim))
    for t in range(count):
        rows = row[max(0, t - config["sliding_window"] + 1) : t + 1]
        if rate:
            rows = np.concatenate([rows, shared["entries"][shared["selected"][t]]])
        logits = query[t] @ rows.T * dim**-0.5
        out[t] = with_sink(logits, w["attn.attn_sink"]) @ rows
    out = turn(out, -at[:, None])
    grouped = out.reshape(count, config["o_groups"], -1)
    first = w["attn.wo_a.weight"].reshape(config["o_groups"], config["o_lora_rank"], -1)
    return np.einsum("sgi,goi->sgo", grouped, first).reshape(count, -1) @ w["attn.wo_b.weight"].T


def latents(config, w, rate, x):
    """One per complete stretch: a gated sum, channel by channel, or the token; normalised."""
    values = x @ w["attn.compressor.wkv.weight"].T
    if rate > 1:
        whole = len(x) // rate * rate
        gates = x[:whole] @ w["attn.compressor.wgate.weight"].T
        shape = (whole // rate, rate, -1)
        values, gates = values[:whole].reshape(shape), gates.reshape(shape)
        gates = np.exp(gates - gates.max(1, keepdims=True))
        values = (values * gates / gates.sum(1, keepdims=True)).sum(1)
    return rms(values, w["attn.compressor.norm.weight"], config["rms_norm_eps"])


def index_scores(config, w, x, latent, turn, rate, keys):
    """sum_h w_h relu(q_h . k), scaled; minus infinity where an entry is not complete."""
    heads, dim, at = config["index_n_heads"], config["index_head_dim"], np.arange(len(x))
    query = (latent @ w["attn.indexer.wq_b.weight"].T).reshape(len(x), heads, dim)
    dots = np.einsum("shd,ed->she", turn(query, at[:, None]), keys)
    weight = x @ w["attn.indexer.weights_proj.weight"].T * (heads * dim) ** -0.5
    scores = np.einsum("sh,she->se", weight, np.maximum(dots, 0.0))
    complete = (at + 1) // rate
    return np.where(np.arange(len(keys))[None] < complete[:, None], scores, -np.inf)


def select(config, layer, scores, shared):
    """The best entries of every query; behind the candidate source only out of its blocks."""
    source, size = config["candidate_source_layer_id"], config["candidate_block_size"]
    if layer == source:
        shared["blocks"] = np.stack([candidates(config, row, shared) for row in scores])
    elif source is not None and layer > source:
        inside = np.repeat(shared["blocks"], size, axis=1)[:, : scores.shape[1]]
        scores = np.where(inside, scores, -np.inf)
    return [best(row, config["index_topk"], shared) for row in scores]


def candidates(config, scores, shared):
    """The blocks with the best entries, and the block with the newest one."""
    size, count = config["candidate_block_size"], config["candidate_topk_blocks"]
    padded = np.concatenate([scores, np.full(-len(scores) % size, -np.inf)])
    of_block = padded.reshape(-1, size).max(1)
    seen = np.flatnonzero(scores > -np.inf)
    if len(seen):
        of_block[seen[-1] // size] = np.inf
    chosen = np.zeros(len(of_block), bool)
    chosen[best(of_block, count, shared)] = True
    return chosen


def best(scores, count, shared):
    """Numbers of the largest scores above minus infinity, ascending."""
    order = np.argsort(-scores, kind="stable")
    if len(order) > count and scores[order[count]] > -np.inf:
        shared["margins"].append(scores[order[count - 1]] - scores[order[count]])
    order = order[:count]
    return np.sort(order[scores[order] > -np.inf])


def with_sink(logits, sink):
    """Softmax with one more logit per head, which is left out of the result."""
    top = np.maximum(logits.max(-1), sink)
    weight = np.exp(logits - top[:, None])
    return weight / (weight.sum(-1) + np.exp(sink - top))[:, None]


def frequencies(config, stretched):
    """Turns per position of each channel pair; YaRN where there are entries."""
    channels = config["qk_rope_head_dim"]
    theta = config["compress_rope_theta"] if stretched else config["rope_theta"]
    f = theta ** (-np.arange(0, channels, 2) / channels)
    rope = config["rope_scaling"]
    if not stretched or rope is None:
        return f
    at = lambda turns: (
        channels
        * math.log(rope["original_max_position_embeddings"] / (2 * math.pi * turns))
        / (2 * math.log(theta))
    )
    low = max(math.floor(at(rope["beta_fast"])), 0)
    high = min(math.ceil(at(rope["beta_slow"])), channels - 1)
    ramp = np.clip((np.arange(channels // 2) - low) / max(high - low, 1e-3), 0, 1)
    return f * (1 - ramp) + f / rope["factor"] * ramp


def rotate_last(x, at, channels, f):
    """Turns pairs of neighbours among the last channels."""
    pairs = x[..., -channels:].reshape(*x.shape[:-1], channels // 2, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * at[..., None] * f)
    turned = np.stack([turned.real, turned.imag], axis=-1).reshape(*x.shape[:-1], channels)
    return np.concatenate([x[..., :-channels], turned], axis=-1)


def moe(config, w, x, shared):
    """The best experts by biased score, weighted by the scores; and one that all tokens pass."""
    scores = np.sqrt(np.logaddexp(0.0, x @ w["ffn.gate.weight"].T))
    experts = [best(r, config["num_experts_per_tok"], shared) for r in scores + w["ffn.gate.bias"]]
    out = expert(config, w, "ffn.shared_experts", x)
    for t, chosen in enumerate(experts):
        share = scores[t, chosen] / (scores[t, chosen].sum() + 1e-20)
        for number, weight in zip(chosen, share * config["routed_scaling_factor"], strict=True):
            out[t] += weight * expert(config, w, f"ffn.experts.{number}", x[t])
    return out, experts


def expert(config, w, name, x):
    """SwiGLU, its gate bounded above and the other factor on both sides."""
    limit = config["swiglu_limit"]
    gate = np.minimum(x @ w[f"{name}.w1.weight"].T, limit)
    up = np.clip(x @ w[f"{name}.w3.weight"].T, -limit, limit)
    return (gate * sigmoid(gate) * up) @ w[f"{name}.w2.weight"].T


def engram(config, w, layer, x, words):
    """What is added to each stream."""
    n, width, eps = config["hc_mult"], config["hidden_size"], config["rms_norm_eps"]
    rows = np.array([ngram_rows(config, layer, word) for word in words])
    both = w["engram.embed.weight"][rows].reshape(len(x), -1) @ w["engram.wkv.weight"].T
    keys, value = both[:, : n * width].reshape(-1, n, width), both[:, n * width :]
    weight = w["engram.q_weight"] * w["engram.k_weight"]
    d = (rms(x, weight, eps) * rms(keys, 1.0, eps)).sum(-1) * width**-0.5
    gate = sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(d), 1e-6)), d))
    return gate[:, :, None] * value[:, None]


def ngram_words(config, tokens, word_of):
    """Of every position the ids of its token and of those before, the newest first."""
    order, pad = config["engram_max_ngram_size"], word_of[config["engram_pad_token_id"]]
    ids = [pad] * (order - 1) + [word_of[token] for token in tokens]
    return [ids[t : t + order][::-1] for t in range(len(tokens))]


def ngram_rows(config, layer, words):
    """Rows of the table for all n-grams that end with a token, in whole numbers without a limit."""
    place = config["engram_layer_ids"].index(layer)
    heads, order = config["engram_n_heads"], config["engram_max_ngram_size"]
    bound = (2**63 - 1) // config["engram_compressed_vocab_size"] // 2
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=order, dtype=np.int64)
    primes = table_primes(config["engram_vocab_size"], heads * (order - 1) * (place + 1))
    primes = primes[-heads * (order - 1) :]
    mixed, rows, first = 0, [], 0
    for back, (word, number) in enumerate(zip(words, drawn, strict=True)):
        mixed ^= int(word) * (2 * int(number) + 1)
        for head in range(heads if back else 0):
            prime = primes[(back - 1) * heads + head]
            rows.append(first + mixed % prime)
            first += prime
    return rows


def table_primes(start, count):
    """The first primes from `start` on."""
    found, number = [], start
    while len(found) < count:
        if all(number % d for d in range(2, math.isqrt(number) + 1)):
            found.append(number)
        number += 1
    return found


def word_key(text):
    """What tokens have in common that spell the same word."""
    composed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    plain = "".join(c for c in composed if unicodedata.category(c)[0] != "M").lower()
    for space in "\t\r\n":
        plain = plain.replace(space, " ")
    while "  " in plain:
        plain = plain.replace("  ", " ")
    if plain == " ":
        return plain
    return plain.strip() or text


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
