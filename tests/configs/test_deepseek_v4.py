import math

import pytest

from dhisparse_jax.configs import DEEPSEEK_V4_FLASH, DEEPSEEK_V4_PRO
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
