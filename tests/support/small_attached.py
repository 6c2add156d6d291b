"""Small drafters attached to the small DeepSeek-V4 and V4.1, random everywhere."""

import dataclasses
import itertools
import json
from functools import cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from dhisparse_jax.configs.attached import AttachedConfig
from dhisparse_jax.models.attached.drafter import drafter_of
from dhisparse_jax.models.attached.hf_config import parse_attached
from dhisparse_jax.models.attached.hf_tensors import (
    attached_pieces,
    attached_shapes,
    canonical_attached_name,
)
from dhisparse_jax.models.attached.load import abstract_attached, make_attached
from dhisparse_jax.models.hf import load_hf
from dhisparse_jax.models.params import fill, flatten, unflatten
from dhisparse_jax.models.stream import load_arrays
from dhisparse_jax.speculation.protocol import Draft
from tests.fixtures.make_v41_fixture import weight_like
from tests.support import numpy_attached, small_v4, small_v41

KINDS = ("v4", "v41")
V4_RAW = json.loads((small_v4.FIXTURE / "config.json").read_text()) | {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 95,
    "dspark_target_layer_ids": [0, 2, 4],
    "dspark_markov_rank": 6,
}
BLOCKS = np.load(small_v41.FIXTURE / "draft.npz")
"""What the NumPy model proposes at some positions of the text of the small V4.1."""


class Small(NamedTuple):
    """A drafter and its target.

    Attributes:
        raw: configuration, as published, at one level.
        target: the served target and its weights.
        config: sizes of the drafter.
        weights: published tensors of both by DeepSeek-V4's names, float64.
    """

    raw: dict
    target: tuple
    config: AttachedConfig
    weights: dict


@cache
def small(kind):
    if kind == "v41":
        raw, target, folder = small_v41.TEXT, small_v41.model(), small_v41.FIXTURE
    else:
        raw, target, folder = V4_RAW, small_v4.model(), small_v4.FIXTURE
    config = parse_attached(raw, target[0].config, 2 if kind == "v41" else 3)
    weights = {
        canonical_attached_name(n): t for n, t in load_file(folder / "model.safetensors").items()
    }
    if kind == "v4":
        weights |= v4_tensors()
    wide = {name: tensor.astype(np.float64) for name, tensor in weights.items()}
    return Small(raw | {"rope_scaling": raw.get("rope_scaling")}, target, config, wide)


@cache
def v4_tensors(seed=3):
    """Published tensors of a drafter for the small DeepSeek-V4."""
    rng, target = np.random.default_rng(seed), load_hf(small_v4.FIXTURE).config
    shapes = attached_shapes(parse_attached(V4_RAW, target, 3), target)
    return {name: weight_like(rng, name, shape) for name, shape in shapes.items()}


@cache
def drafter(kind, length=None):
    """The drafter, and its weights as its functions take them."""
    served, params = small(kind).target
    config, nested = loaded(kind)
    model = fill(lambda: make_attached(config, served.config), nested)
    shared = params["embedding"][...], params["head"]["kernel"][...]
    return drafter_of(model, config, served.config, shared, length=length)


@cache
def loaded(kind):
    """Sizes and nested weights."""
    own = small(kind)
    like = abstract_attached(own.config, own.target[0].config)
    read = lambda name, rows, stored: own.weights[name][rows].astype(np.float32)
    pieces = attached_pieces(own.config, flatten(like))
    return own.config, unflatten(load_arrays(flatten(like), pieces, read), like)


def expected(kind, features, anchor):
    """The block of the NumPy model after some features."""
    own = small(kind)
    return numpy_attached.propose(
        own.raw,
        own.weights,
        np.asarray(features, np.float64),
        int(anchor),
        stages=own.config.stages,
        own_sites=kind == "v4",
    )


def random_features(kind, *shape, seed=0):
    own = small(kind)
    width = len(own.config.taps) * own.raw["hidden_size"]
    return jnp.asarray(np.random.default_rng(seed).normal(size=(*shape, width)), jnp.float32)


def knowing(kind, texts):
    """A draft whose Markov head knows which token followed each one in some texts, the last time.

    The rest of it is random, and small beside that.
    """
    served, params = small(kind).target
    vocabulary = small(kind).raw["vocab_size"]
    config = dataclasses.replace(small(kind).config, markov_rank=vocabulary)
    follows = np.zeros((vocabulary, vocabulary), np.float32)
    for text in texts:
        for before, after in itertools.pairwise(text):
            follows[before] = 0
            follows[before, after] = 200
    _, nested = loaded(kind)
    width = small(kind).raw["hidden_size"]
    nested = nested | {
        "markov_head": {
            "markov_w1": {"weight": jnp.eye(vocabulary)},
            "markov_w2": {"kernel": jnp.asarray(follows)},
        },
        "confidence_head": {"proj": {"kernel": jnp.zeros((width + vocabulary, 1))}},
    }
    model = fill(lambda: make_attached(config, served.config), nested)
    shared = params["embedding"][...], params["head"]["kernel"][...]
    return Draft(*drafter_of(model, config, served.config, shared))
