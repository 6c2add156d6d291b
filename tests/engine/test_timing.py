"""Timing of chains."""

import jax
import jax.numpy as jnp
import numpy as np

from dhisparse_jax.engine.timing import chain, measure


def _add(state, operands, call):
    return state + operands[call], state * 2


def test_chain_hands_the_state_on_and_keeps_every_result():
    operands = [jnp.float32(n) for n in (1, 10, 100)]
    state, results = chain(_add, 3)(jnp.zeros(2), operands)
    np.testing.assert_array_equal(state, [111, 111])
    np.testing.assert_array_equal(results, [[0, 0], [2, 2], [22, 22]])


def test_chain_compiles_every_call():
    # A call that the compiler could drop or share with another would make the time too short.
    operands = [jax.random.normal(jax.random.key(n), (8, 8)) for n in range(4)]
    product = lambda state, operands, call: (state, operands[call] @ operands[call])
    text = chain(product, 4).lower((), operands).compile().as_text()
    assert text.count(" dot(") + text.count("custom-call(") >= 4


def test_measure_counts_calls_and_returns_the_last_state():
    timing, state, results = measure(_add, jnp.zeros(1), [jnp.float32(1)] * 2, calls=2, runs=3)
    assert timing.runs == 3
    assert timing.calls % 2 == 0
    assert 0 < timing.low <= timing.median <= timing.high
    # Two untimed chains, then the runs.
    assert state[0] == 2 * (2 + timing.runs * timing.calls // 2)
    assert len(results) == 2


def test_measure_starts_every_chain_anew_on_demand():
    given = jnp.ones(1)
    _, state, _ = measure(_add, given, [jnp.float32(1)] * 2, calls=2, runs=3, anew=True)
    assert state[0] == 3
    assert given[0] == 1  # not donated
