"""A small Flax NNX model with MLA and an indexer, before and after its cache is a hierarchy.

`Model.whole` is the model without any cache: what its author has, and uses for prefill. What the
hierarchy takes is between the marks.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from dhisparse_jax import Geometry, HierarchyConfig, IndexInputs, RowFormat, plugin

GROUPS = (1, 2)  # the first layer selects for itself, the second one for the third one too
D, HEADS, LATENT, ROPE, INDEX, TOP_K, VOCAB = 32, 4, 16, 8, 8, 8, 64
SCALE = (LATENT + ROPE) ** -0.5


def rotated(x, positions):
    """Rotary embedding of the last ROPE numbers; x [B, T, ..., n]."""
    keep, even, odd = jnp.split(x, [x.shape[-1] - ROPE, x.shape[-1] - ROPE // 2], axis=-1)
    speed = 100.0 ** (-jnp.arange(ROPE // 2) / (ROPE // 2))
    angle = positions[..., None].astype(jnp.float32) * speed[None, None]
    angle = angle.reshape(*positions.shape, *[1] * (x.ndim - 3), -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate((keep, even * cos - odd * sin, odd * cos + even * sin), axis=-1)


class Layer(nnx.Module):
    def __init__(self, selects, rngs):
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.norm, self.row = nnx.RMSNorm(D, rngs=rngs), linear(D, LATENT + ROPE)
        self.query, self.out = linear(D, HEADS * (LATENT + ROPE)), linear(HEADS * LATENT, D)
        self.up, self.down = linear(D, 2 * D), linear(2 * D, D)
        self.index = linear(D, 2 * INDEX + 2 + INDEX) if selects else None  # 2 heads, one key

    def project(self, x, positions):
        """Rows, absorbed queries, and what the indexer computes, of new tokens."""
        y = self.norm(x)
        query = self.query(y).reshape(*y.shape[:2], HEADS, -1)
        row, query = rotated(self.row(y), positions), rotated(query, positions)
        if self.index is None:
            return row, query, None
        queries, weights, keys = jnp.split(self.index(y), [2 * INDEX, 2 * INDEX + 2], axis=-1)
        queries = rotated(queries.reshape(*y.shape[:2], 2, INDEX), positions)
        return (
            row,
            query,
            IndexInputs(queries=queries, weights=weights, keys=rotated(keys, positions)),
        )

    def finish(self, x, values):
        x = x + self.out(values.reshape(*x.shape[:2], -1))
        return x + self.down(jax.nn.silu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, D, rngs=rngs)
        selects = [place == 0 for layers in GROUPS for place in range(layers)]
        self.layers = nnx.List([Layer(first, rngs) for first in selects])
        self.head = nnx.Linear(D, VOCAB, use_bias=False, rngs=rngs)

    def whole(self, tokens):
        """Logits of a whole text [1, S], and the rows and index keys of its tokens."""
        positions = jnp.arange(tokens.shape[1])[None]
        x, seen, rows, keys = self.embed(tokens), None, [], []
        for layer in self.layers:
            row, query, index = layer.project(x, positions)
            if index is not None:
                seen = selected(index)
                keys.append(index.keys[0])
            logits = SCALE * jnp.einsum("bthd,bsd->bhts", query, row)
            weights = jax.nn.softmax(jnp.where(seen[:, None], logits, -jnp.inf), axis=-1)
            x = layer.finish(x, jnp.einsum("bhts,bsd->bthd", weights, row[..., :LATENT]))
            rows.append(row[0])
        return self.head(x), rows, keys

    # -- hierarchy
    def step(self, tokens, cache):
        """Logits of new tokens [R, T]; the cache is the open step of a hierarchy."""
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            row, query, index = layer.project(x, cache.positions)
            attended, cache = plugin.attend(cache, number, row, query, select=index)
            x = layer.finish(x, attended.values)
        return self.head(x), cache

    # --


def selected(index):
    """The TOP_K best positions up to each query's own, as a mask [1, S, S]; ties to the lowest."""
    each = jax.nn.relu(jnp.einsum("bthd,bsd->bths", index.queries, index.keys))
    scores = jnp.einsum("bths,bth->bts", each, index.weights)
    causal = jnp.tri(scores.shape[1], dtype=bool)[None]
    ranks = jnp.argsort(jnp.argsort(-jnp.where(causal, scores, -jnp.inf), axis=-1), axis=-1)
    return causal & (ranks < TOP_K)


# -- hierarchy
def sizes(policy, requests, capacity, hot_rows):
    geometry = Geometry(
        row=RowFormat.mla(latent=LATENT, rope=ROPE, dtype="float32"),
        layers_per_pool=GROUPS,
        top_k=TOP_K,
        index_width=INDEX,
        scale=SCALE,
    )
    return HierarchyConfig(
        geometry=geometry, policy=policy, requests=requests, capacity=capacity, hot_rows=hot_rows
    )


class Decoder:
    """The model's own loop: prompts come in, and every step writes a token for each of them."""

    def __init__(self, model, cfg):
        graph, self.weights = nnx.split(model)
        self.state = plugin.init(cfg)

        def enter(weights, state, request, prompt):
            logits, rows, keys = nnx.merge(graph, weights).whole(prompt[None])
            return logits[0, -1], plugin.admit(state, cfg, request, rows, keys)

        def write(weights, state, tokens, count):
            def one(carry, _):
                state, tokens = carry
                cache = plugin.begin_step(state, cfg)
                logits, cache = nnx.merge(graph, weights).step(tokens[:, None], cache)
                state, best = plugin.end_step(cache), jnp.argmax(logits[:, 0], axis=-1)
                return (state, best), (tokens, logits[:, 0], state.counts.fetched)

            (state, tokens), told = jax.lax.scan(one, (state, tokens), length=count)
            return state, tokens, told

        self.enter = jax.jit(enter, donate_argnums=1)
        self.write = jax.jit(write, donate_argnums=1, static_argnums=3)


# --
