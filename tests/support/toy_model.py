"""A small served model in plain jnp: random weights, MLA-shaped rows, an indexer per group."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dhisparse_jax.config import Geometry, RowFormat
from dhisparse_jax.hierarchy.select import IndexInputs


@dataclasses.dataclass(frozen=True)
class ToyModel:
    """Residual layers of sparse attention; positions enter through a random table."""

    geometry: Geometry
    context: int
    vocabulary: int = 61
    width: int = 24
    heads: int = 2
    index_heads: int = 3

    def init(self, seed):
        rng = np.random.default_rng(seed)
        draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, jnp.float32)
        row, index, d = self.geometry.row, self.geometry.index_width, self.width
        layer = lambda: {
            "row": draw(d, row.width),
            "query": draw(d, self.heads * row.width),
            "out": draw(self.heads * row.value_width, d),
        }
        group = lambda layers: {
            "layers": [layer() for _ in range(layers)],
            "iq": draw(d, self.index_heads * index),
            "ik": draw(d, index),
            "iw": draw(d, self.index_heads),
        }
        return {
            "embed": draw(self.vocabulary, d) * 8,
            "place": draw(self.context + 512, d) * 8,
            "groups": [group(n) for n in self.geometry.layers_per_pool],
            "head": draw(d, self.vocabulary),
        }

    def embed(self, params, tokens):
        return params["embed"][tokens]

    def run_group(self, params, pool, x, positions, open_group, attend, taps=()):
        group = params["groups"][pool]
        here = x + params["place"][positions]
        split = lambda y, heads: y.reshape(*y.shape[:-1], heads, -1)
        opened = open_group(
            IndexInputs(
                queries=split(here @ group["iq"], self.index_heads),
                weights=here @ group["iw"],
                keys=here @ group["ik"],
            )
        )
        tapped = []
        for number, layer in enumerate(group["layers"]):
            y = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
            query = split(y @ layer["query"], self.heads)
            values, opened = attend(opened, number, y @ layer["row"], query)
            x = x + values.reshape(*x.shape[:-1], -1).astype(x.dtype) @ layer["out"]
            if number in taps:
                tapped.append(x)
        return x, tuple(tapped), opened

    def logits(self, params, x):
        return (x @ params["head"]).astype(jnp.float32)


def toy(layers_per_pool=(1, 1, 2), top_k=8, context=96, row="float32", index=(6, "float32")):
    """A toy model and its weights.

    `row` is the dtype or the format of its rows, `index` the width and dtype of its index keys.
    """
    geometry = Geometry(
        row=RowFormat(width=12, value_width=8, dtype=row),
        layers_per_pool=layers_per_pool,
        top_k=top_k,
        index_width=index[0],
        index_dtype=index[1],
        scale=12**-0.5,
    )
    model = ToyModel(geometry=geometry, context=context)
    with jax.ensure_compile_time_eval():
        return model, model.init(0)
