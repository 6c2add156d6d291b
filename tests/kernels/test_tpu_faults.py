"""Faults that are put into TPU kernels, interpreted: each of them is noticed."""

import numpy as np
import pytest

from pallas_kernels.common import tpu_records
from pallas_kernels.common.backends import targeting
from pallas_kernels.retrieve import cases as retrieve_cases
from pallas_kernels.retrieve import tpu as retrieve_tpu
from pallas_kernels.sparse_attention import cases as attention_cases
from pallas_kernels.sparse_attention import tpu as attention_tpu
from tests.support import attention
from tests.support.tpu import only_interpreted, races, tiled, tiled_host

pytestmark = only_interpreted

SMALL_BLOCKS = attention_tpu.Tuning(block=16)


def attend():
    """Attention in several blocks, so that both buffers are filled more than once."""
    inputs = attention_cases.random(queries=2, top_k=40, selected=(40, 40), dtype="bfloat16")

    def run(*operands, **options):
        return attention_tpu.sparse_attention(*operands, tuning=SMALL_BLOCKS, **options)

    with targeting("tpu"):
        return inputs, attention.run(inputs, run)


def test_kernels_without_a_fault_pass():
    with races() as detectors:
        attention.assert_close(*attend())
    assert [detector.races_found for detector in detectors] == [False]


def test_rows_that_are_copied_where_others_are_read_are_a_race(monkeypatch):
    copy = attention_tpu._row_copy

    def into_the_first_buffer(slots, slot, buffer, *more):
        return copy(slots, slot, buffer.ref.at[0], *more)

    monkeypatch.setattr(attention_tpu, "_row_copy", into_the_first_buffer)
    with races() as detectors:
        attend()
    assert [detector.races_found for detector in detectors] == [True]


def test_rows_that_nobody_has_waited_for_are_nan(monkeypatch):
    monkeypatch.setattr(attention_tpu, "_wait", lambda *_: None)
    _, (values, lse) = attend()
    assert np.isnan(values.astype(np.float32)).all()
    assert np.isnan(lse).all()


def test_a_record_that_is_not_there_raises(monkeypatch):
    """Without the check that gives poison in its place."""
    inputs = retrieve_cases.chosen([60], [1])
    monkeypatch.setattr(tpu_records, "in_range", lambda ids, _: ids == ids)
    with targeting("tpu"), pytest.raises(Exception, match="Out-of-bounds"):
        retrieve_tpu.retrieve(tiled_host(inputs.host), tiled(inputs.slots), inputs.fetches)
