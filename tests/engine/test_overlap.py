"""The device gets its next steps before the host reads those before; what that must not change."""

import numpy as np
import pytest

from dhisparse_jax.cli.report import OutputFile
from dhisparse_jax.cli.selections import recorded
from dhisparse_jax.engine import recording
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.flight import Flight
from tests.support.jobs import assert_baseline
from tests.support.serving import CHUNK, POLICIES, config, drafted, engine, model, request, run
from tests.support.toy_draft import toy_draft


@pytest.fixture
def order(monkeypatch):
    """Launches and landings, as they come."""
    seen, launch, land = [], Engine.dispatch, Flight.land

    def seen_launch(self):
        seen.append("launch")
        return launch(self)

    def seen_land(self):
        seen.append("land")
        return land(self)

    monkeypatch.setattr(Engine, "dispatch", seen_launch)
    monkeypatch.setattr(Flight, "land", seen_land)
    return seen


def ahead(order):
    """Dispatches that were launched and had not landed, after every launch."""
    counts = np.cumsum([1 if it == "launch" else -1 for it in order])
    return [int(count) for count, it in zip(counts, order, strict=True) if it == "launch"]


def test_every_step_is_launched_before_the_one_before_is_read(order):
    result = run(engine(*POLICIES["fixed"]), [request(9, 8), request(9, 8, seed=1)])
    assert len(result.steps) == 7
    assert ahead(order) == [1, *[2] * 6]
    assert order[-1] == "land"


@pytest.mark.parametrize("steps", [1, 4])
def test_a_known_length_costs_no_step_too_many(order, steps):
    served = Engine(*model(), config(*POLICIES["fixed"]), chunk=CHUNK, steps=steps)
    result = run(served, [request(9, 1 + 4 * steps), request(9, 1 + 2 * steps, seed=1)])
    assert len(result.steps) == 4 * steps
    assert order.count("launch") == 4


def test_a_surprising_end_costs_one_dispatch_without_a_trace(order):
    """A stop token: the row takes no part in the dispatch that was launched already."""
    served, tokens = engine(*POLICIES["fixed"]), run(engine("resident", 1), [request(12, 20)])
    text = tokens.tokens[0]
    end = next(n for n in range(5, 20) if text[n] not in text[:n])
    order.clear()
    known = run(served, [request(12, end + 1)])
    assert order.count("launch") == end
    order.clear()
    stopped = run(served, [request(12, 20, stop=(text[end],))])
    assert order.count("launch") == end + 1
    assert (stopped.tokens, stopped.finished) == (known.tokens, {0: "stop"})
    assert stopped.steps == known.steps, "the dispatch too many selected or fetched something"
    assert_baseline(served)


def test_others_do_not_notice(order):
    """One ends by surprise in the middle, another takes its row: tokens as when alone."""
    served = engine(*POLICIES["adaptive"])
    asked = [request(12 + n, 20, seed=n) for n in range(4)]
    alone = [run(served, [item]).tokens[0] for item in asked]
    cut = next(n for n in range(4, 20) if alone[0][n] not in alone[0][:n])
    asked[0] = request(12, 20, stop=(alone[0][cut],))
    order.clear()
    together = run(served, asked)
    assert together.tokens == {0: alone[0][: cut + 1], **dict(enumerate(alone[1:], start=1))}
    assert set(ahead(order)) == {1, 2}


def test_with_a_draft(order):
    """Several tokens a step: the host does not know how many when it launches the next."""
    asked = [request(12, 25), request(30, 25, seed=1)]
    plain = run(engine("resident", 1), asked)
    texts = [[*item.prompt, *plain.tokens[n]] for n, item in enumerate(asked)]
    served = drafted(*POLICIES["fixed"], toy_draft(texts, length=3))
    order.clear()
    result = run(served, asked)
    assert result.tokens == plain.tokens
    assert 2 in ahead(order)
    assert order.count("launch") <= len(result.steps) + 1


def test_a_recording_never_waits_for_the_newest(order, monkeypatch, tmp_path):
    """It reads a dispatch when the next one has been launched; the last one at the end."""
    packed = recording._Launched.packed

    def seen_packed(self, bits):
        order.append("record")
        return packed(self, bits)

    monkeypatch.setattr(recording._Launched, "packed", seen_packed)
    cfg = config(*POLICIES["fixed"], record_selections=True)
    served = Engine(*model(), cfg, chunk=CHUNK)
    with recorded(served, OutputFile(tmp_path / "r.sel")):
        result = run(served, [request(9, 8)])
        assert len(result.steps) == 7
        assert order.count("record") == 6
    launches = [order[:n].count("launch") for n, it in enumerate(order) if it == "record"]
    assert launches == [2, 3, 4, 5, 6, 7, 7]
    assert ahead([it for it in order if it != "record"]) == [1, *[2] * 6]
    events = recording.read_recording(tmp_path / "r.sel").events
    assert sum(isinstance(event, recording.Step) for event in events) == 7
