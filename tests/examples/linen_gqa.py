"""A small Flax Linen model with GQA that selects by a rule of its own, over a hierarchy.

Every layer reads the first token, the newest ones, and those whose summaries fit best: no index
keys of the library, but a few numbers per token that the model keeps itself. What the hierarchy
takes is between the marks. `Model.whole` is the model without any cache.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from dhisparse_jax import Geometry, HierarchyConfig, RowFormat, plugin

LAYERS, D, HEADS, KV_HEADS, HEAD, SUMMARY, VOCAB = 2, 32, 4, 2, 8, 4, 64
NEWEST, BEST = 4, 5
TOP_K, SCALE = 1 + NEWEST + BEST, HEAD**-0.5


def choose(probe, summaries, position):
    """Positions that one query reads, int32 [TOP_K]; -1 for none, and some may be there twice."""
    newest = position - jnp.arange(NEWEST)
    seen = jnp.arange(summaries.shape[0]) <= position
    scores, best = jax.lax.top_k(jnp.where(seen, summaries @ probe, -jnp.inf), BEST)
    best = jnp.where(scores > -jnp.inf, best, -1)
    return jnp.concatenate((jnp.zeros(1, jnp.int32), jnp.maximum(newest, -1), best))


choose_all = jax.vmap(jax.vmap(choose, (0, None, 0)))  # requests, then their queries


class Layer(nn.Module):
    def setup(self):
        self.norm = nn.RMSNorm()
        self.query = nn.DenseGeneral((HEADS, HEAD), use_bias=False)
        self.kv = nn.DenseGeneral((2, KV_HEADS, HEAD), use_bias=False)
        self.out = nn.DenseGeneral(D, axis=(-2, -1), use_bias=False)
        self.mlp = nn.Sequential([nn.Dense(2 * D), nn.gelu, nn.Dense(D)])

    def project(self, x):
        y = self.norm(x)
        kv = self.kv(y)
        return self.query(y), (kv[:, :, 0], kv[:, :, 1])

    def whole(self, x, seen):
        query, (keys, values) = self.project(x)
        query = query.reshape(*x.shape[:2], KV_HEADS, -1, HEAD)
        logits = SCALE * jnp.einsum("btghd,bsgd->bghts", query, keys)
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], logits, -jnp.inf), axis=-1)
        values = jnp.einsum("bghts,bsgd->btghd", weights, values).reshape(*x.shape[:2], HEADS, HEAD)
        return self.finish(x, values)

    # -- hierarchy
    def __call__(self, x, cache, number, chosen):
        query, row = self.project(x)
        attended, cache = plugin.attend(cache, number, row, query, select=chosen)
        return self.finish(x, attended.values), cache

    # --

    def finish(self, x, values):
        x = x + self.out(values)
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    context: int

    def setup(self):
        self.embed, self.place = nn.Embed(VOCAB, D), nn.Embed(self.context, D)
        self.summary, self.probe = nn.Dense(SUMMARY), nn.Dense(SUMMARY)
        self.layers = [nn.remat(Layer, static_argnums=(3,))() for _ in range(LAYERS)]
        self.head = nn.Dense(VOCAB, use_bias=False)

    def whole(self, tokens):
        """Logits of whole texts [B, S]."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = self.embed(tokens) + self.place(positions)
        chosen = choose_all(self.probe(x), self.summary(x), positions)
        seen = (chosen[..., None] == jnp.arange(tokens.shape[1])[None, None, None]).any(axis=-2)
        for layer in self.layers:
            x = layer.whole(x, seen)
        return self.head(x)

    # -- hierarchy
    def __call__(self, tokens, cache, summaries):
        """Logits of new tokens [R, T]; the cache is the open step of a hierarchy."""
        x = self.embed(tokens) + self.place(cache.positions)
        row = jnp.arange(tokens.shape[0])[:, None]
        summaries = summaries.at[row, cache.positions].set(self.summary(x))
        chosen = choose_all(self.probe(x), summaries, cache.positions)
        for number, layer in enumerate(self.layers):
            x, cache = layer(x, cache, number, None if number else chosen)
        return self.head(x), cache, summaries


def sizes(policy, requests, capacity, hot_rows):
    geometry = Geometry(
        row=RowFormat.gqa(KV_HEADS, HEAD, dtype="float32"),
        layers_per_pool=(LAYERS,),  # one selection for all layers
        top_k=TOP_K,
        scale=SCALE,
    )
    return HierarchyConfig(
        geometry=geometry, policy=policy, requests=requests, capacity=capacity, hot_rows=hot_rows
    )


def feed(model, cfg, params, carry, tokens):
    """One token [R] more for every request; the carry is the hierarchy and the summaries."""
    state, summaries = carry
    cache = plugin.begin_step(state, cfg)
    logits, cache, summaries = model.apply({"params": params}, tokens[:, None], cache, summaries)
    return (plugin.end_step(cache), summaries), logits[:, 0]


def start(cfg):
    """Requests without a prompt: its tokens go through `feed` as well."""
    state = plugin.init(cfg)
    admit = jax.jit(plugin.admit, static_argnums=1, donate_argnums=0)
    for request in range(cfg.requests):
        state = admit(state, cfg, request)
    return state, jnp.zeros((cfg.requests, cfg.capacity, SUMMARY))


# --
