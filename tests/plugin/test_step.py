"""What a model may do with a step: scans, remat, rows of bytes; and what only values can show."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from dhisparse_jax import IndexInputs, RowFormat, plugin
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy import check_invariants
from dhisparse_jax.hierarchy.heads import attend_slots
from tests.support.plugged import TOP_K, admitted, choose, layer_of, rows, scanned, sizes, unrolled


def run(step, cfg, steps=3):
    state = jax.jit(admitted, static_argnums=1, donate_argnums=0)(plugin.init(cfg), cfg)
    step, found = jax.jit(step, static_argnums=1, donate_argnums=0), []
    for _ in range(steps):
        values, state = step(state, cfg)
        found.append(np.asarray(values))
    assert all(check_invariants(state, cfg).values())
    return np.stack(found)


def attended(position, layer):
    """The same in NumPy, float64."""
    chosen = sorted({position, *range(0, 5 * (TOP_K - 1), 5)} & set(range(position + 1)))
    mine = np.asarray(rows(jnp.asarray(chosen), layer), np.float64)
    logits = 0.3 * mine @ (np.asarray(rows(jnp.asarray(position), layer), np.float64) + 1.0)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum() @ mine[:, :8]


def test_a_scan_over_layers_is_the_same_step():
    cfg = sizes()
    found = run(unrolled, cfg)
    np.testing.assert_allclose(run(scanned, cfg), found, rtol=1e-5, atol=1e-6)
    for step, request in np.ndindex(3, 2):
        position = 17 - 3 * request + step
        wanted = sum(attended(position, layer) for layer in range(3))
        np.testing.assert_allclose(found[step, request, 0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("of", ["row", "query"])
def test_rows_have_no_gradient(of):
    cfg = sizes()

    @jax.checkpoint
    def one(factor, step):
        row = rows(step.positions, 0)
        given = {"row": row, "query": row[:, :, None]}
        given[of] = factor * given[of]
        return plugin.attend(step, 0, **given, select=choose(step.positions))

    loss = lambda factor, state: one(factor, plugin.begin_step(state, cfg))[0].values.sum()
    slope = partial(jax.eval_shape, jax.grad(loss), 1.0, plugin.abstract(cfg))
    if of == "query":
        assert slope().dtype == jnp.float32
        return
    with pytest.raises(UserError, match="rows are stored as bytes and have no gradient"):
        slope()


def test_a_scanned_layer_has_a_branch_for_every_layer_and_none_for_padding():
    """Three rows of 48 bytes are padded to 256, where five would fit."""
    cfg = sizes(groups=(3,))
    traced = jax.make_jaxpr(partial(attend_slots, cfg.geometry, 0))(
        jnp.int32(0),
        jnp.zeros((2, 1, 1, 12)),
        jnp.zeros((9, 64), jnp.int32),
        jnp.zeros((2, 1, 6), jnp.int32),
    )
    (switch,) = [each for each in traced.eqns if each.primitive.name == "cond"]
    assert len(switch.params["branches"]) == 3


def test_rows_of_bytes_come_back_as_they_were():
    cfg = sizes(RowFormat.opaque(20), groups=(2,))
    bytes_of = lambda positions, layer: (
        positions[..., None] * 7 + jnp.arange(20).reshape(*[1] * positions.ndim, 20) + 50 * layer
    ).astype(jnp.uint8)

    @jax.jit
    def step(state):
        step, told = plugin.begin_step(state, cfg), []
        for layer in range(2):
            choice = None if layer else choose(step.positions)
            selected, step = plugin.read(step, layer, bytes_of(step.positions, layer), choice)
            told.append(selected)
        return told, plugin.end_step(step)

    prompt = [bytes_of(jnp.arange(23), layer) for layer in range(2)]
    admit = jax.jit(plugin.admit, static_argnums=1)
    state = admit(plugin.init(cfg), cfg, 1, prompt)
    fetched = 0
    for position in range(23, 27):
        told, state = step(state)
        fetched += int(state.counts.fetched.sum())
        for layer, selected in enumerate(told):
            valid = np.asarray(selected.valid)
            chosen = [*range(0, 25, 5), position] if position != 25 else [0, 5, 10, 15, 20, 25]
            assert selected.positions[1, 0][valid[1, 0]].tolist() == chosen
            wanted = bytes_of(selected.positions, layer)
            wanted = np.where(valid[..., None], wanted, 0)
            np.testing.assert_array_equal(selected.rows, wanted)
            assert not valid[0].any()
    assert fetched > 0


def one_layer():
    """A step of one layer that selects what it is told."""
    cfg = sizes(groups=(1,), capacity=24)

    def step(state, chosen):
        step = plugin.begin_step(state, cfg)
        row = rows(step.positions, 0)
        attended, step = plugin.attend(step, 0, row, row[:, :, None], select=chosen)
        return attended.values, plugin.end_step(step)

    return cfg, step


def test_a_query_that_selects_what_it_does_not_see_gets_nan():
    cfg, step = one_layer()
    state, admit = plugin.init(cfg), jax.jit(plugin.admit, static_argnums=1)
    for request in range(2):
        state = admit(state, cfg, request, [rows(jnp.arange(20), 0)])
    checked = jax.jit(checkify.checkify(step))
    for wrong in (21, 24, -2, 2**31 - 1):
        chosen = jnp.asarray([[[3, wrong]], [[3, 20]]], jnp.int32)
        error, (values, _) = checked(state, chosen)
        assert np.isnan(values[0]).all()
        assert np.isfinite(values[1]).all()
        with pytest.raises(checkify.JaxRuntimeError, match="group 0 selects positions that"):
            error.throw()


def test_a_request_that_cannot_come_gives_nan_and_harms_no_other():
    cfg, step = one_layer()
    step = jax.jit(step)

    @jax.jit
    def admit(state, row, length):
        return plugin.admit(state, cfg, row, [rows(jnp.arange(20), 0)], length=length)

    chosen = jnp.zeros((2, 1, 1), jnp.int32)
    both = admit(admit(plugin.init(cfg), 0, 20), 1, 12)
    wanted = np.asarray(step(both, chosen)[0])
    for row, length, full in ((1, 9, 1), (2, 9, 1), (-1, 9, 0), (1, 21, 1), (1, -1, 1)):
        state = both if row != 1 or length == 9 else plugin.leave(both, cfg, 1)
        state = admit(state, row, length)
        assert all(check_invariants(state, cfg).values())
        values, state = step(state, chosen)
        assert np.isnan(values[full]).all()
        np.testing.assert_array_equal(values[1 - full], wanted[1 - full])
        state = admit(plugin.leave(state, cfg, full), full, 12)
        assert np.isfinite(step(state, chosen)[0]).all()


def test_a_row_that_is_not_there_cannot_leave():
    cfg, _ = one_layer()
    leave = jax.jit(checkify.checkify(plugin.leave), static_argnums=1)
    before = jax.jit(plugin.admit, static_argnums=(1, 2))(plugin.init(cfg), cfg, 1)
    for row in (-1, 2):
        error, state = leave(before, cfg, row)
        with pytest.raises(checkify.JaxRuntimeError, match=f"there is no row {row}"):
            error.throw()
        assert state.active.tolist() == [False, True]
    error, state = leave(before, cfg, 0)
    with pytest.raises(checkify.JaxRuntimeError, match="row 0 is free"):
        error.throw()
    for after in (state, leave(before, cfg, 1)[1]):
        assert all(check_invariants(after, cfg).values())


def test_a_scan_that_leaves_a_layer_out_gives_nan():
    cfg = sizes(groups=(2,), capacity=24)

    def step(state, numbers):
        step = plugin.begin_step(state, cfg)
        step = plugin.select(step, 0, choose(step.positions))

        def one(step, layer):
            values, step = layer_of(step, layer)
            return step, values

        step, values = jax.lax.scan(one, step, numbers)
        return values, plugin.end_step(step)

    state = jax.jit(plugin.admit, static_argnums=(1, 2))(plugin.init(cfg), cfg, 0)
    checked = jax.jit(checkify.checkify(step))
    for numbers, wrong in (([0, 0], [1]), ([0, 2], [1]), ([-1, 0], [0])):
        error, (values, after) = checked(state, jnp.asarray(numbers, jnp.int32))
        with pytest.raises(checkify.JaxRuntimeError, match="is not in group 0, or has kept its"):
            error.throw()
        assert np.isnan(values[wrong, 0]).all()
        _, (values, _) = checked(after, jnp.arange(2, dtype=jnp.int32))
        assert np.isnan(values[:, 0]).all()
    error, (values, after) = checked(state, jnp.arange(2, dtype=jnp.int32))
    error.throw()
    assert np.isfinite(values[:, 0]).all()
    assert after.length.tolist() == [1, 0]


@pytest.mark.parametrize(
    "part",
    [
        pytest.param("queries", marks=pytest.mark.slow),
        pytest.param("weights", marks=pytest.mark.slow),
        "keys",
    ],
)
def test_a_selection_by_what_is_no_number_gives_nan(part):
    cfg = dataclasses.replace(
        sizes(groups=(1,), requests=1, capacity=24),
        geometry=dataclasses.replace(sizes(groups=(1,)).geometry, index_width=4),
    )

    @jax.jit
    @checkify.checkify
    def step(state, index):
        step = plugin.begin_step(state, cfg)
        values, step = layer_of(step, 0, IndexInputs(**index))
        return values, plugin.end_step(step)

    state = jax.jit(plugin.admit, static_argnums=(1, 2))(plugin.init(cfg), cfg, 0)
    shapes = {"queries": (1, 1, 2, 4), "weights": (1, 1, 2), "keys": (1, 1, 4)}
    index = {name: jnp.ones(shape) for name, shape in shapes.items()}
    error, (values, _) = step(state, index)
    error.throw()
    assert np.isfinite(values).all()
    error, (values, _) = step(state, index | {part: index[part].at[..., 0].set(jnp.nan)})
    with pytest.raises(checkify.JaxRuntimeError, match="selects by queries, weights or keys that"):
        error.throw()
    assert np.isnan(values).all()


def test_checkify_tells_of_a_step_without_requests_and_beyond_the_capacity():
    cfg, step = one_layer()
    chosen = jnp.zeros((2, 1, 2), jnp.int32)
    checked = jax.jit(checkify.checkify(step))
    error, _ = checked(plugin.init(cfg), chosen)
    with pytest.raises(checkify.JaxRuntimeError, match="a step without a request: admit one"):
        error.throw()
    admit = jax.jit(checkify.checkify(plugin.admit), static_argnums=1)
    error, state = admit(plugin.init(cfg), cfg, 0, [rows(jnp.arange(23), 0)])
    error.throw()
    error, (values, state) = checked(state, chosen)
    error.throw()
    assert np.isfinite(values).all()
    error, (values, _) = checked(state, chosen)
    assert np.isnan(values[0]).all()
    with pytest.raises(checkify.JaxRuntimeError, match="24 positions, and the capacity is 24"):
        error.throw()
    error, _ = admit(state, cfg, 0, [rows(jnp.arange(23), 0)])
    with pytest.raises(checkify.JaxRuntimeError, match="row 0 is taken"):
        error.throw()


def test_checkify_tells_of_tokens_that_are_kept_beyond_the_capacity():
    cfg = sizes(groups=(1,), capacity=24, queries=2)

    def step(state, accepted):
        step = plugin.begin_step(state, cfg)
        values, step = layer_of(step, 0, step.positions[..., None])
        return values, plugin.end_step(step, accepted)

    full = {"length": jnp.array([23, 24]), "active": jnp.array([True, False])}
    state = dataclasses.replace(plugin.init(cfg), **full)
    checked = jax.jit(checkify.checkify(step))
    error, (values, after) = checked(state, jnp.array([1, 2], jnp.int32))
    error.throw()
    assert np.isnan(values[0]).any(axis=-1).tolist() == [False, True]
    error, (_, after) = checked(state, jnp.array([2, 2], jnp.int32))
    with pytest.raises(checkify.JaxRuntimeError, match=r"would keep 25 positions, .* 24: accept"):
        error.throw()
    assert after.length[0] == 24


def test_every_head_reads_its_own_keys_and_values():
    cfg = sizes(RowFormat.gqa(2, 4, "float32", value=8), groups=(2,))
    shaped = lambda positions, heads, width, shift: rows(positions, shift, heads * width).reshape(
        *positions.shape, heads, width
    )
    keys_values = lambda at: (shaped(at, 2, 4, 0.0), shaped(at, 2, 8, 1.0))

    @jax.jit
    def step(state):
        step = plugin.begin_step(state, cfg)
        query, row = shaped(step.positions, 6, 4, 2.0), keys_values(step.positions)
        attended, step = plugin.attend(step, 0, row, query, select=choose(step.positions))
        selected, step = plugin.read(step, 1, row)
        return query, attended, selected, plugin.end_step(step)

    state = jax.jit(plugin.admit, static_argnums=1)(
        plugin.init(cfg), cfg, 0, [keys_values(jnp.arange(19))] * 2
    )
    query, attended, selected, _ = step(state)
    valid = np.asarray(selected.valid[0, 0])
    keys, values = (np.asarray(each[0, 0][valid], np.float64) for each in selected.rows)
    for head in range(6):
        mine = head // 3
        logits = 0.3 * keys[:, mine] @ np.asarray(query[0, 0, head], np.float64)
        weights = np.exp(logits - logits.max())
        wanted = weights / weights.sum() @ values[:, mine]
        np.testing.assert_allclose(attended.values[0, 0, head], wanted, rtol=1e-4, atol=1e-5)


def test_tokens_that_are_not_accepted_leave_no_trace():
    def firsts(queries):
        cfg = sizes(groups=(1,), queries=queries, tail=2 * queries)

        @jax.jit
        def step(state):
            step = plugin.begin_step(state, cfg)
            row = rows(step.positions, 0).at[:, 1:].set(9.0)
            attended, step = plugin.attend(
                step, 0, row, row[:, :, None], select=choose(step.positions)
            )
            return attended.values[:, 0], plugin.end_step(step, jnp.ones(2, jnp.int32))

        state, found = plugin.init(cfg), []
        for request in range(2):
            state = jax.jit(plugin.admit, static_argnums=1)(state, cfg, request)
        for _ in range(12):
            values, state = step(state)
            found.append(np.asarray(values))
        return np.stack(found)

    np.testing.assert_allclose(firsts(3), firsts(1), rtol=1e-6, atol=1e-6)


def test_a_state_of_other_sizes_is_refused():
    cfg = sizes()
    other = dataclasses.replace(cfg, hot_rows=cfg.hot_rows + 16)
    state = plugin.init(cfg)
    for call in (plugin.begin_step, lambda state, cfg: plugin.admit(state, cfg, 0)):
        with pytest.raises(UserError, match="cfg says"):
            call(state, other)


@pytest.mark.parametrize("accepted", [-2, 4])
def test_more_or_fewer_tokens_than_there_are_cannot_stay(accepted):
    cfg = sizes()

    def step(state, accepted):
        return unrolled(state, cfg, accepted)[1]

    state = jax.jit(admitted, static_argnums=1)(plugin.init(cfg), cfg)
    before = state.length
    checked = jax.jit(checkify.checkify(step, errors=checkify.user_checks))
    error, after = checked(state, jnp.full(cfg.requests, accepted, jnp.int32))
    with pytest.raises(checkify.JaxRuntimeError, match="accepted is not in the range"):
        error.throw()
    moved = np.asarray(after.length - before)[np.asarray(state.active)]
    assert set(moved.tolist()) == {min(max(accepted, 0), cfg.queries)}
    with pytest.raises(UserError, match="it must be int32"):
        jax.eval_shape(step, state, jnp.zeros(cfg.requests + 1, jnp.int32))
