"""What is refused while a step is traced, each with one clear line."""

import jax
import jax.numpy as jnp
import pytest

from dhisparse_jax import Geometry, IndexInputs, RowFormat, plugin
from dhisparse_jax.errors import UserError
from dhisparse_jax.plugin.rows import shape_of
from tests.support.plugged import choose, rows, sizes


def traced(cfg, body):
    """Trace a step of which `body` is the inside."""

    def step(state):
        return plugin.end_step(body(plugin.begin_step(state, cfg)))

    jax.eval_shape(step, plugin.abstract(cfg))


def attend(step, layer=0, row=None, query=None, select="choose"):
    row = rows(step.positions, 0) if row is None else row
    query = jnp.zeros((2, 1, 4, 12)) if query is None else query
    select = choose(step.positions) if isinstance(select, str) else select
    return plugin.attend(step, layer, row, query, select=select)[1]


INDEX = IndexInputs(
    queries=jnp.zeros((2, 1, 3, 5)), weights=jnp.zeros((2, 1, 3)), keys=jnp.zeros((2, 1, 5))
)
GQA = RowFormat.gqa(2, 8, "float32")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"row": jnp.zeros((2, 1, 11))}, r"rows have shape \(2, 1, 11\); .* \(2, 1, 12\)"),
        ({"row": jnp.zeros((2, 1, 12), jnp.bfloat16)}, "rows are bfloat16; .* float32: cast them"),
        ({"row": (jnp.zeros(1), jnp.zeros(1))}, "rows are one array of 12 numbers, not 2 arrays"),
        ({"query": jnp.zeros((1, 1, 4, 12))}, r"queries have shape \(1, 1, 4, 12\); .* \(2, 1, 'h"),
        ({"query": jnp.zeros((2, 4, 12))}, r"queries have shape \(2, 4, 12\)"),
        ({"query": jnp.zeros((2, 1, 4, 8))}, "a query has 8 numbers; rows have keys of 12"),
        ({"select": None}, "layer 0 is the first one of group 0; it must select"),
        ({"select": jnp.zeros((2, 1, 7), jnp.int32)}, "selects 7 positions; top_k is 6: raise it"),
        ({"select": jnp.zeros((2, 6), jnp.int32)}, r"int32 \(2, 1, 6\), not int32 \(2, 6\)"),
        ({"select": jnp.zeros((2, 1, 6))}, r"not float32 \(2, 1, 6\)"),
        ({"select": INDEX}, "index_width is 0: select by positions"),
        ({"layer": 3}, r"there is no layer 3; layers_per_pool \(1, 2\) has 3"),
        ({}, r"layers \[1, 2\] kept no rows in this step; layers_per_pool \(1, 2\)"),
    ],
)
def test_a_layer_that_does_not_fit(given, message):
    with pytest.raises(UserError, match=message):
        traced(sizes(), lambda step: attend(step, **given))


def test_a_group_selects_once():
    with pytest.raises(UserError, match="group 0 has selected in this step"):
        traced(sizes(), lambda step: attend(attend(step)))


def test_a_layer_keeps_its_rows_once():
    twice = lambda step: attend(attend(step, layer=1, select="choose"), layer=1, select=None)
    with pytest.raises(UserError, match="layer 1 has kept its rows in this step"):
        traced(sizes(), lambda step: twice(attend(step)))
    scanned = lambda step: plugin.select(attend(step), 1, choose(step.positions))
    with pytest.raises(UserError, match="layer 2 has kept its rows in this step"):
        traced(sizes(), lambda step: attend(attend(scanned(step), 2, select=None), 2, select=None))


def test_a_scan_selects_before_it():
    number = jnp.int32(0)
    with pytest.raises(UserError, match="select before the scan"):
        traced(sizes(), lambda step: attend(step, layer=number))
    with pytest.raises(UserError, match="no group has selected yet"):
        traced(sizes(), lambda step: attend(step, layer=number, select=None))


@pytest.mark.parametrize(
    ("row", "query", "message"),
    [
        (jnp.zeros((2, 1, 32)), (4, 8), r"a pair of arrays: \(keys, values\)"),
        ((jnp.zeros((2, 1, 2, 8)), jnp.zeros((2, 1, 2, 6))), (4, 8), "values have shape .*2, 6"),
        ((jnp.zeros((2, 1, 2, 8)),) * 2, (3, 8), "3 query heads cannot be split among 2 heads"),
    ],
)
def test_keys_and_values_that_do_not_fit(row, query, message):
    with pytest.raises(UserError, match=message):
        traced(sizes(GQA), lambda step: attend(step, row=row, query=jnp.zeros((2, 1, *query))))


def test_lists_are_no_arrays():
    with pytest.raises(UserError, match="index keys of a group are a list; they must be an array"):
        shape_of("index keys of a group", [[0.0, 1.0]])


def test_bytes_are_read():
    cfg, row = sizes(RowFormat.opaque(8)), jnp.zeros((2, 1, 8), jnp.uint8)
    with pytest.raises(UserError, match=r"rows are bytes, .*; read them instead"):
        traced(cfg, lambda step: attend(step, row=row, query=jnp.zeros((2, 1, 1, 8))))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"length": 5}, "a prompt without rows"),
        ({"request": 2}, "there is no row 2; there are 2 requests"),
        ({"rows": [rows(jnp.arange(9), 0)] * 2}, "rows of 2 layers; layers_per_pool has 3"),
        ({"rows": [rows(jnp.arange(41), 0)] * 3}, "41 positions in 41 rows; the capacity is 40"),
        ({"rows": [rows(jnp.arange(9), 0)] * 3, "length": 10}, "10 positions in 9 rows"),
        (
            {"rows": [rows(jnp.arange(9), 0)] * 3, "keys": [jnp.zeros((9, 4))] * 2},
            "index keys of 2 groups; there must be 0",
        ),
    ],
)
def test_a_prompt_that_does_not_fit(given, message):
    cfg, given = sizes(), {"request": 0} | given
    with pytest.raises(UserError, match=message):
        jax.eval_shape(lambda state: plugin.admit(state, cfg, **given), plugin.abstract(cfg))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RowFormat.opaque(10), "a row of 10 x uint8 .* is not whole words of 4 bytes"),
        (lambda: RowFormat.mla(8, 3, "bfloat16"), "a row of 11 x bfloat16 .* pad it"),
        (lambda: RowFormat.gqa(0, 8, "float32"), "rows of 0 heads; at least 1"),
        (lambda: RowFormat.gqa(3, 5, "bfloat16", value=4), "a row of 27 x bfloat16 in 3 parts"),
        (lambda: RowFormat.mla(8, 4, "float64"), "rows of 'float64'; there are float32, bfloat16"),
        (lambda: sizes(groups=()), r"layers_per_pool is \(\); a group has layers"),
        (
            lambda: Geometry(row=GQA, layers_per_pool=(1,), top_k=0, scale=1.0),
            "top_k is 0; a query selects at least 1",
        ),
    ],
)
def test_formats_that_cannot_be(make, message):
    with pytest.raises(UserError, match=message):
        make()
