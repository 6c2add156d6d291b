"""The toy model without any hierarchy: whole sequences, a dense mask, plain jnp."""

import jax.numpy as jnp
import numpy as np


def dense_logits(model, params, tokens):
    """Logits of every position of one text; every query selects its exact top K."""
    geometry = model.geometry
    length = len(tokens)
    causal = np.tril(np.ones((length, length), bool))

    def open_group(index):
        dots = jnp.einsum("thd,sd->ths", index.queries[0], index.keys[0], precision="highest")
        scores = np.asarray(jnp.einsum("th,ths->ts", index.weights[0], jnp.maximum(dots, 0.0)))
        selected = np.zeros_like(causal)
        for query, row in enumerate(np.where(causal, scores, -np.inf)):
            best = np.lexsort((np.arange(length), -row))[: geometry.top_k]
            selected[query, best] = True
        return selected & causal

    def attend(selected, layer, row, query):
        logits = geometry.scale * jnp.einsum("thd,sd->hts", query[0], row[0], precision="highest")
        logits = jnp.where(selected[None], logits, -jnp.inf)
        weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        values = row[0, :, : geometry.row.value_width]
        return jnp.einsum("hts,sd->thd", weights, values, precision="highest")[None], selected

    x = model.embed(params, jnp.asarray(tokens, jnp.int32)[None])
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    for pool in range(len(geometry.layers_per_pool)):
        x, _, _ = model.run_group(params, pool, x, positions, open_group, attend)
    return np.asarray(model.logits(params, x)[0])
