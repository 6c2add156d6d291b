"""The benchmark of formats: errors of known arrays, and what is committed."""

import json

import numpy as np
import pytest

from bench.formats import EVERY, kept_rows, relative_error
from bench.record import RESULTS
from dhisparse_jax.config import RowFormat

OFF = np.array([[0.3, 0.4, 9.0]])


def test_relative_error_by_hand():
    given = np.array([[3.0, 4.0, 100.0]])
    assert relative_error(given, lambda values: values + OFF, 2) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("row", "most"),
    [
        (RowFormat(width=80, value_width=64, dtype="float32"), 0.0),
        (RowFormat(width=80, value_width=64, dtype="bfloat16"), 2.0**-8),
        (RowFormat.fp8(64, 16), 2.0**-4),
    ],
)
def test_error_of_a_row_is_within_the_format(row, most):
    values = np.random.default_rng(0).normal(size=(200, 80)).astype(np.float32)
    found = relative_error(values, lambda given: kept_rows(row, given), 64)
    assert most / 4 <= found <= most


def test_committed_figures():
    """fp8 history costs the bundled model less than a hundredth of a bit per byte."""
    document = json.loads((RESULTS / "cpu" / "formats.json").read_text())
    found = {(item["rows"], item["index_keys"]): item for item in document["formats"]}
    assert list(found) == [tuple(formats) for formats in EVERY]
    exact, small = found[EVERY[0]], found[EVERY[-1]]
    assert small["bytes_per_token"] < exact["bytes_per_token"] / 2.5
    assert abs(small["bits_per_byte"] - exact["bits_per_byte"]) < 0.01
