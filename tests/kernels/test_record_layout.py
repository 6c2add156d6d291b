"""How records lie in memory: as words, and as whole tiles."""

import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.geometry import Geometry, RowFormat
from pallas_kernels.common.backends import targeting
from pallas_kernels.common.record_layout import (
    TILES,
    WORDS,
    as_records,
    as_words,
    lanes_view,
    layout_of,
    lines_view,
    pool_of,
    record_layout,
)
from pallas_kernels.common.rows import gather_words, records_at, write_words

RNG = np.random.default_rng(0)


def words(*shape):
    return jnp.asarray(RNG.integers(-(2**31), 2**31, shape, np.int64).astype(np.int32))


@pytest.mark.parametrize(
    ("layout", "rows", "row", "stride", "shape"),
    [
        (WORDS, 4, 164, 164, (672,)),
        (WORDS, 1, 288, 288, (288,)),
        (TILES, 4, 164, 256, (8, 128)),
        (TILES, 1, 164, 256, (8, 128)),
        (TILES, 4, 288, 384, (16, 128)),
        (TILES, 1, 33, 128, (8, 128)),
    ],
)
def test_records_are_padded(layout, rows, row, stride, shape):
    assert layout.row_stride(row) == stride
    assert layout.shape(layout.record_words(rows, row)) == shape


def test_the_platform_chooses():
    assert (record_layout("tpu"), record_layout("gpu"), record_layout()) == (TILES, WORDS, WORDS)
    geometry = Geometry(
        row=RowFormat.fp8(512, 64),
        layers_per_pool=(1, 4),
        top_k=4,
        index_width=128,
        index_dtype="bfloat16",
        scale=1.0,
    )
    sizes = {"policy": Policy.FIXED, "requests": 1, "capacity": 16, "hot_rows": 4}
    with targeting("tpu"):
        cfg = HierarchyConfig(geometry=geometry, **sizes)
    assert [cfg.record_bytes(pool) for pool in range(2)] == [4096, 4096]
    assert cfg.record_shape(0) == cfg.key_shape == (8, 128)
    assert cfg != HierarchyConfig(geometry=geometry, **sizes)


@pytest.mark.parametrize("tiles", [1, 2, 3])
def test_views_are_of_whole_records(tiles):
    pool = as_records(words(5, 1024 * tiles), TILES)
    assert layout_of(pool) is TILES
    lanes, lines = lanes_view(pool), lines_view(pool)
    for number, record in enumerate(np.asarray(pool)):
        columns = lanes[:, 128 * tiles * number :][:, : 128 * tiles]
        # Tile by tile, as a TPU lays out the columns.
        seen = np.asarray(columns).reshape(8, tiles, 128).transpose(1, 0, 2)
        np.testing.assert_array_equal(seen.reshape(record.shape), record)
        own = lines[8 * tiles * number :][: 8 * tiles, 0]
        np.testing.assert_array_equal(own, record)
    np.testing.assert_array_equal(pool_of(lanes, pool), pool)


@pytest.mark.parametrize("layout", [WORDS, TILES])
def test_rows_are_written_and_read_where_they_are(layout):
    stride, width = layout.row_stride(164), 164
    record = (layout.record_words(4, width),)
    table = as_records(words(6, *record), layout)
    new, places = words(2, 3, width), jnp.asarray([[4, 0, 6], [2, 7, 5]], jnp.int32)
    for offset in (2 * stride, jnp.int32(2 * stride)):
        written = write_words(table, places, offset, new)
        read = gather_words(written, jnp.minimum(places, 5), offset, width)
        inside = np.asarray(places) < 6
        np.testing.assert_array_equal(np.asarray(read)[inside], np.asarray(new)[inside])
        before, after = (np.asarray(as_words(pool, layout)) for pool in (table, written))
        changed = np.zeros_like(before, bool)
        changed[[4, 0, 2, 5], 2 * stride : 3 * stride] = True
        np.testing.assert_array_equal(after[~changed], before[~changed])


def test_a_row_may_start_within_a_line():
    table = as_records(words(3, 1024), TILES)
    flat = np.asarray(as_words(table, TILES))
    for offset, width in ((0, 5), (100, 100), (860, 164), (120, 300)):
        read = gather_words(table, jnp.asarray([2, 0], jnp.int32), offset, width)
        np.testing.assert_array_equal(read, flat[[2, 0], offset : offset + width])


def test_a_record_that_is_not_there_is_poison():
    table = as_records(words(3, 1024), TILES)
    found = records_at(table, jnp.asarray([1, 3, -1], jnp.int32))
    np.testing.assert_array_equal(found[0], table[1])
    assert (np.asarray(found[1:]) == -1).all()
