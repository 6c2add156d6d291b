"""What is refused while a step is traced, each with one clear line."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dhisparse_jax import Geometry, IndexInputs, Policy, RowFormat, plugin
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


def geometry(**fields):
    given = {"row": GQA, "layers_per_pool": (1,), "top_k": 2, "scale": 1.0}
    return Geometry(**given | fields)


GQA = RowFormat.gqa(2, 8, "float32")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"row": jnp.zeros((2, 1, 11))}, r"rows have shape \(2, 1, 11\); .* \(2, 1, 12\)"),
        ({"row": jnp.zeros((2, 1, 12), jnp.bfloat16)}, "rows are bfloat16; .* float32: cast them"),
        ({"row": (jnp.zeros(1), jnp.zeros(1))}, "rows are one array of 12 numbers, not 2 arrays"),
        (
            {"query": jnp.zeros((1, 1, 4, 12))},
            r"queries have shape \(1, 1, 4, 12\); .* \(2, 1, heads",
        ),
        ({"query": jnp.zeros((2, 4, 12))}, r"queries have shape \(2, 4, 12\)"),
        ({"query": jnp.zeros((2, 1, 4, 8))}, "a query has 8 numbers; rows have keys of 12"),
        ({"select": None}, "layer 0 is the first one of group 0; it must select"),
        ({"select": jnp.zeros((2, 1, 7), jnp.int32)}, "selects 7 positions; top_k is 6: raise it"),
        ({"select": jnp.zeros((2, 6), jnp.int32)}, r"int32 \(2, 1, 6\), not int32 \(2, 6\)"),
        ({"select": jnp.zeros((2, 1, 6))}, r"not float32 \(2, 1, 6\)"),
        ({"select": INDEX}, "index_width is 0: select by positions"),
        ({"layer": 3}, r"there is no layer 3; layers_per_pool \(1, 2\) has 3"),
        ({}, r"layers \[1, 2\] of layers_per_pool \(1, 2\) kept no rows in this step: each"),
    ],
)
def test_a_layer_that_does_not_fit(given, message):
    with pytest.raises(UserError, match=message):
        traced(sizes(), lambda step: attend(step, **given))


def test_positions_leave_no_index_keys():
    cfg = sizes()
    cfg = dataclasses.replace(cfg, geometry=dataclasses.replace(cfg.geometry, index_width=5))
    with pytest.raises(UserError, match="positions keep no index key, and index_width is 5"):
        traced(cfg, attend)


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
    with pytest.raises(UserError, match=r"in a scan over layers, .*, `select` comes before it"):
        traced(sizes(), lambda step: attend(step, layer=step.positions[0, 0]))
    with pytest.raises(UserError, match="no group has selected yet"):
        traced(sizes(), lambda step: attend(step, layer=step.positions[0, 0], select=None))
    traced(sizes(groups=(1,)), lambda step: attend(step, layer=NUMBER))


NUMBER = jnp.int32(0)


def test_layers_in_another_order():
    with pytest.raises(UserError, match="layer 2 comes before group 1 has selected, which layer 1"):
        traced(sizes(), lambda step: attend(attend(step), 2, select=None))
    with pytest.raises(UserError, match="layer 0 comes too late: group 0 ended when group 1"):
        traced(sizes(), lambda step: attend(attend(attend(step), 1), 0, select=None))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"row": RowFormat.mla(6, 6, "float32")}, "was made for row .*value_width=6"),
        ({"groups": (2, 1)}, r"was made for layers_per_pool \(2, 1\), and cfg says \(1, 2\)"),
        ({"policy": Policy.ADAPTIVE}, "the state is of another policy than cfg's fixed"),
        ({"record_selections": True}, "another record_selections than cfg's False"),
    ],
)
def test_a_state_that_was_made_for_others(fields, message):
    with pytest.raises(UserError, match=message):
        jax.eval_shape(
            lambda state: plugin.begin_step(state, sizes()), plugin.abstract(sizes(**fields))
        )


def test_an_engine_deals_out_host_pages():
    with pytest.raises(UserError, match=r"host_pages is 5, .*: leave it out, so that 2 .* 5 pages"):
        plugin.begin_step(plugin.abstract(sizes()), sizes(host_pages=5))


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


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (-1, "there is no row -1; there are 2 requests"),
        (2, "there is no row 2; there are 2 requests"),
    ],
)
def test_a_row_that_is_not_there(request_, message):
    cfg = sizes()
    with pytest.raises(UserError, match=message):
        jax.eval_shape(lambda state: plugin.admit(state, cfg, request_), plugin.abstract(cfg))
    with pytest.raises(UserError, match=message):
        jax.eval_shape(lambda state: plugin.leave(state, cfg, request_), plugin.abstract(cfg))


def test_a_mesh_has_an_axis():
    mesh = jax.make_mesh((1,), ("data",))
    for given, message in (
        ((mesh,), "a mesh of 1 devices, but no axis"),
        ((None, "data"), "an axis, 'data', but no mesh"),
        ((mesh, "rows"), r"the mesh has no axis 'rows'; its axes are \('data',\)"),
    ):
        for make in (plugin.init, plugin.abstract):
            with pytest.raises(UserError, match=message):
                make(sizes(), *given)


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
        (
            {"rows": [rows(jnp.arange(41), 0)] * 3},
            "41 rows, padding included, and the capacity is 40",
        ),
        ({"rows": [rows(jnp.arange(9), 0)] * 3, "length": 10}, "a length of 10, and 9 rows"),
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
        (lambda: RowFormat.gqa(0, 8, "float32"), "kv_heads is 0; it must be at least 1"),
        (lambda: RowFormat.gqa(2, 0, "float32", value=4), "4 for it, and a key has at least 1"),
        (
            lambda: RowFormat.mla(8, -4, "float32"),
            "a value of 8 numbers is not in a row that has 4",
        ),
        (
            lambda: RowFormat.mla(-4, 8, "float32"),
            "the value of a row is -4; it must be at least 0",
        ),
        (lambda: RowFormat.fp8(0, 8), "latent is 0; it must be at least 1"),
        (lambda: RowFormat.fp8(128, -4), "the part of a row after it is -4"),
        (lambda: geometry(scale=float("nan")), "scale is nan; it must be a number"),
        (lambda: geometry(index_width=-1), "index_width is -1; it must be at least 0"),
        (lambda: geometry(index_width=4, index_dtype="float16"), "index_dtype is 'float16'; use"),
        (
            lambda: geometry(index_width=3, index_dtype="bfloat16"),
            "3 x bfloat16 is not whole words",
        ),
        (lambda: sizes(capacity=2**31), "capacity is 2147483648; it must be at most 2,147,483,647"),
        (lambda: sizes(requests=2**20, capacity=2**12), "positions in host memory is 4294967296"),
        (lambda: sizes(moves_per_step=-1), "moves_per_step is -1; it must be at least 0"),
        (lambda: sizes(queries=41, tail=82), "a step of 41 queries goes beyond a capacity of 40"),
        (lambda: RowFormat.gqa(3, 5, "bfloat16", value=4), "a row of 27 x bfloat16 in 3 parts"),
        (lambda: RowFormat.mla(8, 4, "float64"), "rows of 'float64'; there are float32, bfloat16"),
        (lambda: sizes(groups=()), r"layers_per_pool is \(\); a group has layers"),
        (
            lambda: geometry(top_k=0),
            "top_k is 0; it must be at least 1",
        ),
    ],
)
def test_formats_that_cannot_be(make, message):
    with pytest.raises(UserError, match=message):
        make()


OF_OTHER_TYPES = """
import jax, jax.numpy as jnp, numpy as np
from dhisparse_jax import Geometry, RowFormat, plugin
from dhisparse_jax.errors import UserError
from tests.support.plugged import choose, rows, sizes

cfg, PROMPT, QUERY = sizes(groups=(1,)), rows(jnp.arange(9), 0), jnp.zeros((2, 1, 4, 12))
STATE = plugin.abstract(cfg)

def step(layer=0, query=QUERY, select=None, accepted=None, scanned=False, cfg=cfg):
    def body(state):
        step = plugin.begin_step(state, cfg)
        step = plugin.select(step, 0, choose(step.positions)) if scanned else step
        chosen = None if scanned else choose(step.positions) if select is None else select
        _, step = plugin.attend(step, layer, rows(step.positions, 0), query, select=chosen)
        return plugin.end_step(step, accepted)
    jax.eval_shape(body, plugin.abstract(sizes(groups=(1,))))

def admit(request=0, rows=(PROMPT,), **given):
    jax.eval_shape(
        lambda state: plugin.admit(state, cfg, request, rows, **given), plugin.abstract(cfg)
    )

def geometry(**given):
    usual = {"row": cfg.geometry.row, "layers_per_pool": (1,), "top_k": 2, "scale": 1.0}
    return Geometry(**usual | given)

assert geometry(layers_per_pool=[1, 2]) == geometry(layers_per_pool=(1, 2))
step(layer=np.int64(0), select=np.zeros((2, 1, 3), np.int32), accepted=np.ones(2, np.int32))
admit(rows=(each for each in [PROMPT]), length=np.int64(3))
for call in (
    lambda: step(query=[[1.0]]),
    lambda: step(query=jnp.zeros((2, 1, 4, 12), jnp.int32)),
    lambda: step(select=[[[0]]]),
    lambda: step(select=np.zeros((2, 1, 3), int)),
    lambda: step(accepted=1),
    lambda: step(accepted=[1, 1]),
    lambda: step(layer=jnp.float32(0), scanned=True),
    lambda: step(layer=jnp.zeros(2, jnp.int32), scanned=True),
    lambda: step(cfg=None),
    lambda: step(layer=0.0),
    lambda: jax.eval_shape(lambda s: plugin.begin_step(plugin.begin_step(s, cfg), cfg), STATE),
    lambda: plugin.begin_step(None, cfg),
    lambda: plugin.begin_step(cfg, STATE),
    lambda: plugin.admit(cfg, STATE, 0),
    lambda: plugin.init(cfg.geometry),
    lambda: plugin.attend(STATE, 0, PROMPT, QUERY),
    lambda: plugin.end_step(STATE),
    lambda: admit(request=0.5),
    lambda: admit(request=None),
    lambda: admit(request=jnp.zeros(2, jnp.int32)),
    lambda: admit(rows=PROMPT),
    lambda: admit(length=2.5),
    lambda: RowFormat.opaque(4.0),
    lambda: sizes(groups=3),
    lambda: sizes(groups=(1.5,)),
    lambda: geometry(scale=None),
    lambda: geometry(row=None),
    lambda: sizes(requests=1.0),
):
    try:
        call()
        print("it was taken")
    except UserError as error:
        print(error)
"""

OTHER_TYPES_SAY = """
queries are a list; they must be an array
queries are int32, and so would be values; they must be floats
selected positions are a list; they must be an array
a selection is int32 (2, 1, 6), not int64 (2, 1, 3)
accepted numbers are a int; they must be an array
accepted numbers are a list; they must be an array
a layer is float32 (); it must be one whole number
a layer is int32 (2,); it must be one whole number
cfg is a NoneType; it must be a HierarchyConfig
a layer is float64 (); it must be one whole number
a step has begun already: `end_step` comes before the next one
the state is a NoneType; it must be what init returns
cfg is a HierarchyState; it must be a HierarchyConfig
cfg is a HierarchyState; it must be a HierarchyConfig
cfg is a Geometry; it must be a HierarchyConfig
the step is a HierarchyState; it must be what begin_step returns
the step is a HierarchyState; it must be what begin_step returns
a row is float64 (); it must be one whole number
a row is object (); it must be one whole number
a row is int32 (2,); it must be one whole number
rows are one array; give a list, with those of all layers
length is float64 (); it must be one whole number
the width of a row is 4.0; it must be a whole number
layers_per_pool is 3; a group has layers, as in (1, 2)
a group in layers_per_pool (1.5,) is 1.5; it must be a whole number
scale is None; it must be a number
row is None; it must be a RowFormat
requests is 1.0; it must be a whole number
"""


def test_what_is_of_another_type_is_one_line():
    """In a process of its own: in this one, types are checked before the library sees them."""
    found = subprocess.run(
        [sys.executable, "-c", OF_OTHER_TYPES],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout.splitlines() == OTHER_TYPES_SAY.strip().splitlines(), found.stderr[-2000:]
