"""Rates of the machine are measured."""

from dhisparse_jax.engine.rates import measure_floors, read_rates


def test_floors_are_measured():
    floors = measure_floors(2, copy_bytes=1 << 20, side=64)
    assert all(0 < value < 1e6 for value in floors)


def test_reads_are_measured_for_every_span():
    spans = (1 << 16, 1 << 18)
    rates = list(read_rates(32, spans, call_bytes=1 << 12, runs=2))
    assert [(rate.record_bytes, rate.span_bytes) for rate in rates] == [(128, s) for s in spans]
    assert all(0 < rate.low <= rate.gbps <= rate.high for rate in rates)
