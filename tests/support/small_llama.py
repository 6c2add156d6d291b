"""The model of `tests/fixtures/llama_tiny`, and random indexers for it."""

import json
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from dhisparse_jax.configs.llama import FittedConfig
from dhisparse_jax.models.llama.indexers import FittedIndexers
from dhisparse_jax.models.llama.load import config_of_fields, model_of

FIXTURE = Path(__file__).parents[1] / "fixtures" / "llama_tiny"


@cache
def fields():
    return json.loads((FIXTURE / "fields.json").read_text())


@cache
def case():
    with np.load(FIXTURE / "case.npz") as found:
        return dict(found)


def tensors():
    return {n.removeprefix("tensor."): x for n, x in case().items() if n.startswith("tensor.")}


def tokens():
    return jnp.asarray(case()["tokens"], jnp.int32)


@cache
def model():
    return model_of(config_of_fields(fields(), tied=True), tensors())


FITTED = FittedConfig(
    hidden_size=64,
    layers_per_group=(2,),
    index_heads=2,
    index_dim=16,
    qk_rope_dim=8,
    rope_theta=5e3,
    param_dtype="float32",
)


@cache
def indexers():
    return FittedIndexers(FITTED, rngs=nnx.Rngs(0))
