"""A second model of the drafts in NumPy float64, written row by row from the published formulas.

Weights come by their published names, matrices `[out, in]`. One block of one request at a time.
"""

import numpy as np


def rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - np.max(x))
    return e / np.sum(e)


def rope(x, position, theta):
    """Pairs (i, i + half) turn by position * theta^(-i / half)."""
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-i / half)
        out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
        out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return out


class NumpyDraft:
    """The draft of a configuration and its published tensors."""

    def __init__(self, config, tensors, embedding, head):
        self.c = config
        self.w = {name: np.asarray(array, np.float64) for name, array in tensors.items()}
        self.embedding = np.asarray(embedding, np.float64)
        self.head = np.asarray(head, np.float64)

    def heads(self, matrix, x):
        return (matrix @ x).reshape(-1, self.c.head_dim)

    def key_value(self, layer, x, position):
        w, at = self.w, f"layers.{layer}.self_attn."
        keys = [
            rope(rms(k, w[at + "k_norm.weight"], self.c.norm_eps), position, self.c.rope_theta)
            for k in self.heads(w[at + "k_proj.weight"], x)
        ]
        return keys, list(self.heads(w[at + "v_proj.weight"], x))

    def attention(self, layer, y, start, features):
        """`y`: what enters the projections, one vector per row."""
        w, c, at = self.w, self.c, f"layers.{layer}.self_attn."
        fused = [
            rms(w["fc.weight"] @ f, w["hidden_norm.weight"], c.norm_eps) for f in features[:start]
        ]
        context = [self.key_value(layer, f, p) for p, f in enumerate(fused)]
        own = [self.key_value(layer, x, start + i) for i, x in enumerate(y)]
        window = c.windows[layer] or 10**9
        out = []
        for i, x in enumerate(y):
            position = start + i
            seen = [kv for p, kv in enumerate(context) if position - p < window]
            for j, kv in enumerate(own):
                if i - j < window and not (c.causal[layer] and j > i):
                    seen.append(kv)
            parts = []
            for h, q in enumerate(self.heads(w[at + "q_proj.weight"], x)):
                q = rope(rms(q, w[at + "q_norm.weight"], c.norm_eps), position, c.rope_theta)
                shared = h // (c.num_heads // c.num_kv_heads)
                scores = [q @ keys[shared] / np.sqrt(c.head_dim) for keys, _ in seen]
                mix = softmax(np.array(scores))
                parts.append(sum(m * v[shared] for m, (_, v) in zip(mix, seen, strict=True)))
            out.append(w[at + "o_proj.weight"] @ np.concatenate(parts))
        return out

    def mlp(self, layer, y):
        w, at = self.w, f"layers.{layer}.mlp."
        gate, up, down = (w[f"{at}{n}_proj.weight"] for n in ("gate", "up", "down"))
        return [down @ (silu(gate @ x) * (up @ x)) for x in y]

    def sublayer(self, name, xs, f):
        """With the two convolutions where there are some."""
        if self.c.selector is None:
            return f(xs)
        s, base = self.c.selector, self.w[name + ".base_kernel"]
        groups = self.c.hidden_size // s.conv_group
        project = self.w[name + ".kernel_projection.weight"]
        dynamic = [(project @ x).reshape(2, s.conv_taps, groups) for x in xs]

        def convolve(side, rows):
            out = []
            for t in range(len(rows)):
                total = np.zeros(self.c.hidden_size)
                for o in range(s.conv_taps):
                    if t - o < 0:
                        continue
                    for channel in range(self.c.hidden_size):
                        kernel = base[side, o, channel]
                        kernel += dynamic[t][side, o, channel // s.conv_group]
                        total[channel] += kernel * rows[t - o][channel]
                out.append(total)
            return out

        return convolve(1, f(convolve(0, xs)))

    def block(self, anchor, start, features):
        """Normed hidden states and raw logits of the proposing rows."""
        c, w = self.c, self.w
        rows = [anchor] + [c.mask_token_id] * (c.block_size - 1)
        h = [self.embedding[token] * c.input_scale for token in rows]
        for layer in range(c.num_layers):
            at = f"layers.{layer}."
            xs = [rms(x, w[at + "input_layernorm.weight"], c.norm_eps) for x in h]
            attend = lambda y, layer=layer: self.attention(layer, y, start, features)
            update = self.sublayer(at + "attention_conv", xs, attend)
            h = [a + b for a, b in zip(h, update, strict=True)]
            xs = [rms(x, w[at + "post_attention_layernorm.weight"], c.norm_eps) for x in h]
            update = self.sublayer(at + "mlp_conv", xs, lambda y, layer=layer: self.mlp(layer, y))
            h = [a + b for a, b in zip(h, update, strict=True)]
        h = [rms(x, w["norm.weight"], c.norm_eps) for x in h]
        h = h if c.anchor_first else h[1:]
        return h, [x @ self.head for x in h]

    def bound(self, logits):
        logits = logits * self.c.output_multiplier
        cap = self.c.logit_softcap
        return logits if cap is None else cap * np.tanh(logits / cap)

    def selector_walk(self, anchor, hidden, logits, choose):
        """Tokens and q of every proposal; `choose` takes the scores of a row's candidates."""
        w, at = self.w, "candidate_selector."
        tokens, qs, previous = [], [], anchor
        for h, u in zip(hidden, logits, strict=True):
            ids = np.argsort(-u, kind="stable")[: self.c.selector.top_k]
            code = w[at + "predecessor_codebook"][previous] * (
                w[at + "hidden_projection.weight"] @ h
            )
            scores = self.bound(u[ids]) + w[at + "successor_codebook"][ids] @ code
            index, q = choose(scores)
            previous = int(ids[index])
            tokens.append(previous)
            qs.append(dict(zip(ids.tolist(), q, strict=True)))
        return tokens, qs

    def markov_walk(self, anchor, hidden, logits, choose):
        """Tokens, q and confidence of every proposal."""
        w, markov = self.w, self.c.markov
        state = np.zeros(markov.rank)
        tokens, qs, confidence, previous = [], [], [], anchor
        for h, u in zip(hidden, logits, strict=True):
            e = w["markov_head.markov_w1.weight"][previous]
            inner = e
            if markov.kind == "gated":
                gate = w["markov_head.gate_proj.weight"] @ np.concatenate([h, e])
                inner = sigmoid(gate + w["markov_head.gate_proj.bias"]) * e
            if markov.kind == "rnn":
                joint = w["markov_head.joint_proj.weight"] @ np.concatenate([state, e, h])
                keep, update, out = np.split(joint + w["markov_head.joint_proj.bias"], 3)
                state = sigmoid(keep) * state + (1 - sigmoid(keep)) * np.tanh(update)
                inner = np.tanh(out)
            scores = self.bound(u) + w["markov_head.markov_w2.weight"] @ inner
            x = np.concatenate([h, e]) if markov.confidence_with_markov else h
            z = w["confidence_head.proj.weight"][0] @ x + w["confidence_head.proj.bias"][0]
            confidence.append(sigmoid(z))
            index, q = choose(scores)
            previous = int(index)
            tokens.append(previous)
            qs.append(dict(enumerate(q)))
        return tokens, qs, confidence
