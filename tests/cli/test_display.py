"""What a person sees on a terminal and elsewhere, drawn into memory."""

import io

import pytest
from rich.console import Console

from dhisparse_jax.cli.display import (
    LiveDisplay,
    PlainDisplay,
    PrefillBar,
    StreamDisplay,
    make_display,
)
from dhisparse_jax.cli.record import RunRecord
from dhisparse_jax.cli.report import Setting
from dhisparse_jax.cli.tables import hierarchy_table, request_table, size_text
from dhisparse_jax.engine.events import Finished, NewTokens, PrefillProgress, StepDone
from dhisparse_jax.engine.request import Request
from tests.cli.fake_engine import METRICS, SIZES


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(height=20):
    return Console(file=Terminal(), width=80, height=height, force_terminal=True)


def pipe():
    return Console(file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), width=80)


def written(console):
    console.file.flush()
    return console.file.buffer.getvalue().decode()


def record_of(*names):
    return RunRecord.of([Request(name=name, prompt=(65,), max_new_tokens=9) for name in names])


def play(display, record, *events):
    for event in events:
        record.add(event)
        display.show(event)


def frame(display):
    """One picture of a live display, without colours."""
    console = Console(file=io.StringIO(), width=80)
    console.print(display._render())
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("names", "out", "kind"),
    [
        ("a", terminal(), StreamDisplay),
        ("a", pipe(), StreamDisplay),
        ("ab", terminal(), LiveDisplay),
        ("ab", pipe(), PlainDisplay),
    ],
)
def test_display_fits_the_output(names, out, kind):
    assert isinstance(make_display(record_of(*names), bytes, out, pipe()), kind)


def test_live_table_shows_each_stage():
    record = record_of("first", "second", "third")
    display = LiveDisplay(record, bytes, terminal())
    play(
        display,
        record,
        PrefillProgress(0, 1, 1),
        NewTokens(0, tuple(b"one\ntwo")),
        PrefillProgress(1, 1, 4),
        StepDone(1, METRICS),
    )
    lines = frame(display).splitlines()
    assert lines[0].strip() == "0 of 3 done, step 1, 7 new tokens"
    row = {name: next(line for line in lines if name in line) for name in ("first", "second")}
    assert "one↵two" in row["first"]
    assert "7" in row["first"]
    assert "━" in row["second"]
    assert "waiting" in next(line for line in lines if "third" in line)


def test_live_table_shows_the_end_of_a_long_text():
    record = record_of("a", "b")
    display = LiveDisplay(record, bytes, terminal())
    play(display, record, PrefillProgress(0, 1, 1), NewTokens(0, tuple(b"x" * 500 + b"the end")))
    assert "the end │" in frame(display)


def test_live_table_leaves_out_what_has_no_room():
    record = record_of(*(f"request {n}" for n in range(30)))
    display = LiveDisplay(record, bytes, terminal(height=17))
    play(display, record, PrefillProgress(29, 1, 1), NewTokens(29, (66,)))
    picture = frame(display)
    assert "request 29" in picture  # what works comes before what waits
    assert "and 20 more" in picture


def test_live_display_prints_finished_texts_once():
    out = terminal()
    record = record_of("a", "b")
    with LiveDisplay(record, bytes, out) as display:
        play(display, record, PrefillProgress(0, 1, 1), NewTokens(0, tuple(b"done")))
        play(display, record, Finished(0, "length"))
        play(display, record, NewTokens(1, tuple(b"half\x1b[2J")))
    text = out.file.getvalue()
    assert text.count("==> a: 1 prompt tokens, 4 new, length <==") == 1
    assert text.count("==> b: 1 prompt tokens, 8 new, interrupted <==") == 1
    assert "half\ufffd[2J" in text


def test_plain_display_prints_texts_when_they_end():
    out, err = pipe(), pipe()
    record = record_of("a", "b")
    with PlainDisplay(record, bytes, out, err) as display:
        play(display, record, PrefillProgress(0, 1, 2), PrefillProgress(0, 2, 2))
        play(display, record, NewTokens(0, tuple(b"text")))
        assert written(out) == ""
        play(display, record, Finished(0, "stop"))
        assert written(out) == "==> a: 1 prompt tokens, 4 new, stop <==\ntext\n\n"
    assert written(err) == "prefill 1/2 a, 1 tokens\n"


def test_stream_shows_a_bar_and_then_the_text():
    out, err = terminal(), terminal()
    record = record_of("a[b]")
    with StreamDisplay(record, bytes, out, err) as display:
        play(display, record, PrefillProgress(0, 1, 2), PrefillProgress(0, 2, 2))
        play(display, record, NewTokens(0, tuple(b"te")), NewTokens(0, tuple(b"xt")))
    assert out.file.getvalue() == "text\n"
    assert "prefill a[b], 1 tokens" in err.file.getvalue()


def test_bar_may_be_stopped_twice():
    console = pipe()
    bar = PrefillBar(record_of("a").requests, console)
    bar.start()
    bar.stop()
    bar.stop()
    assert written(console) == ""


def test_tables_state_every_quantity():
    record = record_of("a")
    record.add(NewTokens(0, (1, 2)))
    record.add(StepDone(1, METRICS))
    record.interrupt()
    console = Console(file=io.StringIO(), width=80)
    setting = Setting("tiny", "cpu", "0.0", "adaptive")
    console.print(hierarchy_table(setting, record, SIZES), request_table(record))
    text = console.file.getvalue()
    values = {
        cells[1].strip(): cells[2].strip()
        for cells in (line.split("│") for line in text.splitlines())
        if len(cells) == 4
    }
    assert values["model"] == "tiny"
    assert values["policy"] == "adaptive"
    assert values["host pools"] == "3.0 MiB"
    assert values["hot pools"] == "1.0 MiB"
    assert values["tails"] == "2.0 KiB"
    assert values["selected rows"] == "8"
    assert values["fetched rows"] == "2"
    assert values["fetched share"] == "25.00%"
    assert values["host bytes read"] == "256 B"
    assert values["steps"] == "1"
    assert "interrupted" in text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2560, "2.5 KiB"), (5 << 40, "5.0 TiB")],
)
def test_sizes_are_in_binary_units(count, text):
    assert size_text(count) == text
