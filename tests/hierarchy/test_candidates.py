"""Selections out of candidate blocks: exactly those of all scores, from the keys of the blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.geometry import PACKED_KEYS, SCALED_KEYS, Candidates, Geometry, RowFormat
from dhisparse_jax.hierarchy.candidates import are_few, best_candidates, candidate_blocks, inside
from dhisparse_jax.hierarchy.formats import stored_keys
from pallas_kernels.index_scores.api import index_scores
from pallas_kernels.top_k.api import top_k

RULE, K, WIDTH, HEADS = Candidates(block=4, count=5), 12, 16, 3
SLOW = pytest.mark.slow


gathered = jax.jit(best_candidates, static_argnums=(0, 1))


def inputs(queries, records, form="float32", seed=0):
    """Small whole numbers, so that sums are exact in any order, and scores are often equal."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.integers(-3, 4, shape), jnp.float32)
    keys = draw(3, records, WIDTH)
    geometry = Geometry(
        row=RowFormat(width=4, value_width=4, dtype="float32"),
        layers_per_pool=(1,),
        top_k=K,
        index_width=WIDTH,
        index_dtype=form,
        scale=1.0,
    )
    return draw(3, queries, HEADS, WIDTH), draw(3, queries, HEADS), stored_keys(geometry, keys)


def choices(queries, visible, seed=0, form="float32", records=None):
    """What the gathered form selects, and what all scores do, from the same blocks."""
    records = records or int(np.max(visible))
    visible = jnp.asarray(visible, jnp.int32)
    one, two = (inputs(queries, records, form, seed + number) for number in (0, 100))
    blocks = candidate_blocks(RULE, index_scores(*one, visible), visible)
    given = (two[0], two[1], one[2], visible)
    found = gathered(RULE, K, *given, blocks)
    return found, top_k(inside(RULE, index_scores(*given), blocks), K), given, blocks


@pytest.mark.parametrize(
    "form",
    [pytest.param("float32", marks=SLOW), pytest.param(SCALED_KEYS, marks=SLOW), PACKED_KEYS],
)
def test_selections_are_those_of_all_scores(form):
    """With ties; queries that see nothing, less than K, and part of a block; rows that differ."""
    visible = np.array([[101, 102, 103], [0, 1, 2], [40, 90, 17]])
    found, expected, _, _ = choices(3, visible, form=form)
    assert np.array_equal(found, expected)
    assert (np.asarray(found[1]) >= 0).sum(axis=-1).tolist() == [0, 1, 2]


@pytest.mark.parametrize("queries", [1, 2, pytest.param(5, marks=SLOW)])
def test_any_number_of_queries_and_of_blocks_in_common(queries):
    for seed in range(4):
        visible = np.random.default_rng(seed).integers(0, 160, (3, queries))
        found, expected, _, _ = choices(queries, visible, seed=seed, records=160)
        assert np.array_equal(found, expected)


def test_keys_outside_the_blocks_are_not_read():
    """Nor those that no query sees: NaN there reaches nothing."""
    visible = np.array([[90, 91], [33, 70], [0, 5]])
    found, _, (queries, weights, keys, seen), blocks = choices(2, visible, records=100)
    poisoned = np.asarray(keys).copy()
    for row in range(3):
        record = np.arange(100)
        candidate = np.isin(record // RULE.block, np.asarray(blocks[row]))
        poisoned[row, ~candidate | (record >= visible[row].max())] = np.nan
    again = gathered(RULE, K, queries, weights, jnp.asarray(poisoned), seen, blocks)
    assert np.array_equal(again, found)


def test_the_program_has_no_scores_of_all_records():
    """V4.1's rule at 100,352 records: the largest float array is of the candidates."""
    rule, records = Candidates(block=8, count=2048), 100_352
    assert are_few(rule, 6, records)
    assert not are_few(rule, 7, records)
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    whole = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)
    text = gathered.lower(
        rule, 512, shape(1, 1, 32, 128), shape(1, 1, 32), shape(1, records, 128), whole(1, 1),
        whole(1, 1, 2048),
    ).as_text()  # fmt: skip
    assert "x100352xf32" not in text  # scores or products of all records
    assert "x16384xf32" in text


def test_blocks_of_the_first_selection_are_ascending_and_each_once():
    rule = dataclasses.replace(RULE, count=3)
    scores = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, 50)), jnp.float32)
    visible = jnp.full((2, 4), 50, jnp.int32)
    blocks = np.asarray(candidate_blocks(rule, scores, visible))
    assert (np.diff(blocks, axis=-1) > 0).all()
    assert (blocks[..., -1] == 12).all()
