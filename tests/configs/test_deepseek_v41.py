import dataclasses
import math

import pytest

from dhisparse_jax.configs import DEEPSEEK_V4_1_FLASH
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.deepseek_v41.decode import geometry_of
from dhisparse_jax.models.deepseek_v41.hf_tensors import published_v41_shapes, table_names


def test_the_preset_has_the_published_size():
    """Published: 552 billion without the tables of n-grams, which have 196.6 billion."""
    shapes = published_v41_shapes(DEEPSEEK_V4_1_FLASH)
    tables = {name: shapes.pop(name) for name in table_names(DEEPSEEK_V4_1_FLASH)}
    memory = {name: shape for name, shape in shapes.items() if ".engram." in name}
    count = lambda found: sum(math.prod(shape) for shape in found.values())
    assert count(tables) == 256 * (384_006_168 + 384_016_682)
    assert round(count(shapes) / 1e9) == 552
    assert count(shapes) - count(memory) == 551_566_165_104
    assert round((count(shapes) + count(tables)) / 1e9) == 748


def test_layers_share_entries_and_selections_as_published():
    config = DEEPSEEK_V4_1_FLASH
    assert [len(group) for group in config.groups] == [8, 6, 6, 20]
    geometry = geometry_of(config, "bfloat16")
    assert geometry.rates == (2, 2, 2, 1)
    assert geometry.layers_per_pool == (1, 1, 1, 1)
    assert geometry.candidates[:3] == (None, None, None)
    assert (geometry.candidates[3].block, geometry.candidates[3].count) == (8, 2048)
    windows = [leaf for pool in geometry.kept for leaf in pool if leaf.span == 128]
    assert len(windows) == config.num_layers


def test_bytes_per_token_are_those_published():
    """Four sources: 288 bytes of an entry and 68 of an index key, for 1/2 + 1/2 + 1/2 + 1 token."""
    geometry = geometry_of(DEEPSEEK_V4_1_FLASH, "bfloat16")
    assert (geometry.row.words * 4, geometry.key_bytes) == (288, 68)
    assert (geometry.row.name, geometry.index_format) == ("fp4", "fp4")
    assert geometry.position_bytes == 890
    windows = [leaf for pool in geometry.kept for leaf in pool if leaf.span == 128]
    assert {leaf.width * 4 for leaf in windows} == {528}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"entry_sources": ()}, "nothing to select"),
        ({"entry_sources": (2, 8, 14, 40)}, "ascending layers of 40"),
        ({"entry_sources": (8, 2, 14, 20)}, "ascending layers"),
        ({"index_sources": (2, 8, 14, 24)}, "lacks a source of entries"),
        ({"index_sources": (1, 2, 8, 14, 20)}, "a layer before 2 selects"),
        ({"rates": (0, 1, *(2,) * 18, *(1,) * 20)}, "a layer before 2 has a rate"),
        ({"rates": (0, 0, *(2,) * 18, *(1,) * 19, 2)}, "layers 20 to 39, which share entries"),
        ({"candidate_source": 14}, "only the last source of entries, 20"),
        ({"candidate_blocks": 63}, "63 blocks of 8 entries are fewer than the 512"),
        ({"engram_rows": (384_006_168, 384_016_683)}, "hit"),
        ({"engram_buckets": 2**24}, "heads of up to 16777216 rows"),
        ({"engram_order": 1}, "an n-gram has two tokens or more"),
        ({"engram_pad_id": 129_280}, "do not fit 129280 tokens"),
        ({"rope_dim": 7}, "rope_dim is 7"),
        ({"table_format": "int4"}, "table_format is 'int4'"),
    ],
)
def test_sizes_that_cannot_be_are_refused_in_one_line(changes, message):
    with pytest.raises(UserError, match=message) as raised:
        dataclasses.replace(DEEPSEEK_V4_1_FLASH, **changes)
    assert "\n" not in str(raised.value)
