"""The sweep of kernel variants: what it checks, and that one bad variant stops nothing."""

import dataclasses
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import tune, variants
from dhisparse_jax.engine.rates import Floors

FLOORS = Floors(hbm_gbps=1, h2d_gbps=1, bf16_tflops=1, launch_us=1)


def rows_of(*tried):
    with ThreadPoolExecutor(2) as pool:
        return list(tune.sweep(list(tried), FLOORS, pool))


@pytest.mark.parametrize("operation", variants.VARIANTS)
def test_a_right_variant_gets_a_time_and_a_wrong_one_a_reason(operation, monkeypatch):
    monkeypatch.setattr(tune, "RUNS", 2)
    right = next(variants.VARIANTS[operation](small=True))

    def wrong(*arrays, **options):
        return jax.tree.map(lambda array: 2 * array, right.call(*arrays, **options))

    def broken(*arrays, **options):
        raise ValueError("does not compile")

    calls = (right.call, broken, wrong)
    good, failed, bad = rows_of(*(dataclasses.replace(right, call=call) for call in calls))
    assert good["time_us"] > 0 and good["ratio"] > 0
    assert good["error"] < 1e-2 and good["timed_error"] < 1e-2
    assert failed["reason"] == "ValueError: does not compile"
    assert bad["reason"] == "wrong result"
    assert "time_us" not in failed | bad
    assert len(tune.table([{"op": operation, **row} for row in (good, failed)]).rows) == 2


def test_every_variant_has_a_label_of_its_own():
    for make in variants.VARIANTS.values():
        tried = list(make(small=False))
        assert len({(variant.case, variant.label) for variant in tried}) == len(tried)
        assert max(Counter(variant.name for variant in tried).values()) <= 8


@pytest.mark.parametrize(
    "found", [[np.nan, 1.0, -np.inf], [1.0, 1.0, 0.0], [-np.inf, 1.0, -np.inf]]
)
def test_error_is_infinite_for_what_no_rounding_explains(found):
    wanted = jnp.array([1.0, 1.0, -jnp.inf])
    assert tune.error(np.array(found), wanted) == np.inf
    assert tune.error(wanted, wanted) == 0.0
    assert tune.error([wanted, wanted.at[0].set(1.5)], [wanted, wanted]) > 0.3
