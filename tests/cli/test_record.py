"""What a run's record counts, with a clock that moves one second at each look."""

import itertools

import pytest

from dhisparse_jax.cli.record import RunRecord
from dhisparse_jax.engine.events import Finished, NewTokens, PrefillProgress, StepDone
from dhisparse_jax.engine.request import Request
from tests.cli.fake_engine import METRICS

EVENTS = (
    PrefillProgress(0, 1, 2),
    PrefillProgress(0, 2, 2),
    NewTokens(0, (1,)),  # what prefill's last position gives
    StepDone(1, METRICS),
    NewTokens(0, (2,)),
    StepDone(2, METRICS),
    NewTokens(0, (3, 4)),
    Finished(0, "length"),
)


def record_of(*events):
    ticks = itertools.count()
    request = Request(name="a", prompt=(5, 6), max_new_tokens=4)
    record = RunRecord.of([request, request], clock=lambda: float(next(ticks)))
    for event in events:
        record.add(event)
    return record


def test_counts_and_times():
    record = record_of(*EVENTS)
    assert record.output_tokens == 4
    assert record.steps == 2
    assert record.totals.selected_rows == 16
    assert record.fetched_share == pytest.approx(0.25)
    assert record.prefill_seconds == 3
    assert record.decode_seconds == 5
    assert record.first_step_seconds == 1
    assert record.tokens_per_s == pytest.approx(4 / 8)
    assert record.steady_tokens_per_s == pytest.approx(2 / 4)


def test_an_empty_run_divides_by_nothing():
    record = record_of()
    assert record.tokens_per_s == record.steady_tokens_per_s == record.fetched_share == 0


def test_stages():
    stages = [record_of(*EVENTS[:n]).requests[0].stage for n in (0, 1, 2, 8)]
    assert stages == ["waiting", "prefill", "decoding", "length"]


def test_interrupt_marks_what_had_not_finished():
    record = record_of(*EVENTS)
    record.interrupt()
    assert [item.finish_reason for item in record.requests] == ["length", "interrupted"]


def test_the_first_dispatch_compiles_however_many_steps_it_has():
    """The tokens of its second step are not steady either."""
    first = (StepDone(1, METRICS), StepDone(2, METRICS), NewTokens(0, (2, 3)))
    record = record_of(NewTokens(0, (1,)), *first, StepDone(3, METRICS), NewTokens(0, (4,)))
    assert record.steady_tokens == 1
