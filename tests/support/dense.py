"""The toy model without any hierarchy: whole sequences, a dense mask, plain jnp.

What a hierarchy would keep is rounded to its format, by hand.
"""

import jax.numpy as jnp
import numpy as np

from dhisparse_jax.model import layers_of
from tests.support.fp8 import kept_keys, kept_rows


def dense_logits(model, params, tokens):
    """Logits of every position of one text; every query selects its exact top K."""
    x, _ = dense_streams(model, params, tokens)
    return np.asarray(model.logits(params, x)[0])


def dense_features(model, params, tokens, taps):
    """What a drafter that reads after the layers `taps` gets to see: [positions, features]."""
    _, streams = dense_streams(model, params, tokens)
    return np.concatenate([np.asarray(streams[layer][0]) for layer in taps], axis=-1)


def dense_streams(model, params, tokens):
    """The residual stream after the last layer, and after every layer by number."""
    geometry = model.geometry
    length = len(tokens)
    causal = np.tril(np.ones((length, length), bool))

    def open_group(index):
        keys = kept_keys(index.keys[0], geometry)
        dots = jnp.einsum("thd,sd->ths", index.queries[0], keys, precision="highest")
        scores = np.asarray(jnp.einsum("th,ths->ts", index.weights[0], jnp.maximum(dots, 0.0)))
        selected = np.zeros_like(causal)
        for query, row in enumerate(np.where(causal, scores, -np.inf)):
            best = np.lexsort((np.arange(length), -row))[: geometry.top_k]
            selected[query, best] = True
        return selected & causal

    def attend(selected, layer, row, query):
        rows = kept_rows(row[0], geometry.row)
        logits = geometry.scale * jnp.einsum("thd,sd->hts", query[0], rows, precision="highest")
        logits = jnp.where(selected[None], logits, -jnp.inf)
        weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        values = rows[:, : geometry.row.value_width]
        return jnp.einsum("hts,sd->thd", weights, values, precision="highest")[None], selected

    x = model.embed(params, jnp.asarray(tokens, jnp.int32)[None])
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    streams = {}
    for pool, count in enumerate(geometry.layers_per_pool):
        places = tuple(range(count))
        x, tapped, _ = model.run_group(params, pool, x, positions, open_group, attend, places)
        streams |= zip(layers_of(geometry, pool, places), tapped, strict=True)
    return x, streams
