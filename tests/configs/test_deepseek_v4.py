import dataclasses
import math

import pytest

from dhisparse_jax.configs import DEEPSEEK_V4_FLASH, DEEPSEEK_V4_PRO
from dhisparse_jax.models.deepseek_v4.decode import geometry_of
from dhisparse_jax.models.deepseek_v4.hf_tensors import published_v4_shapes, v4_integers


@pytest.mark.parametrize(
    ("config", "parameters", "kinds"),
    [
        (DEEPSEEK_V4_FLASH, 284_332_240_471, (2, 21, 20)),
        (DEEPSEEK_V4_PRO, 1_572_997_201_763, (0, 30, 31)),
    ],
)
def test_presets_have_the_published_sizes(config, parameters, kinds):
    """Published: 284.3 billion and 1.57 trillion."""
    tables = v4_integers(config)
    shapes = published_v4_shapes(config).items()
    assert sum(math.prod(shape) for name, shape in shapes if name not in tables) == parameters
    count = config.layer_kinds.count
    assert (count("window"), count("selected"), count("all")) == kinds
    assert len(config.groups) == kinds[1]
    assert sum(config.groups, ()) == tuple(range(config.num_layers))


@pytest.mark.parametrize(
    ("config", "published"), [(DEEPSEEK_V4_FLASH, 3514), (DEEPSEEK_V4_PRO, 5031)]
)
def test_bytes_per_token_are_those_published(config, published):
    """With index keys of 4 bits; the presets have them in 8."""
    geometry = geometry_of(config, "bfloat16")
    assert geometry.row.words * 4 == 584
    assert geometry.key_bytes == 132
    narrow = geometry_of(dataclasses.replace(config, index_format="fp4"), "bfloat16")
    assert narrow.key_bytes == 68
    assert round(narrow.position_bytes) == published


def test_windows_and_unfinished_entries_do_not_grow_with_the_context():
    config = dataclasses.replace(DEEPSEEK_V4_FLASH, kv_format="bfloat16", index_format="bfloat16")
    kept = [leaf for pool in geometry_of(config, "bfloat16").kept for leaf in pool]
    assert sum(leaf.span == 128 and leaf.width == 256 for leaf in kept) == config.num_layers
    assert sum(leaf.span is None for leaf in kept) == 20
    assert all(leaf.rows(10**6, 4) == leaf.span + 3 for leaf in kept if leaf.span)
