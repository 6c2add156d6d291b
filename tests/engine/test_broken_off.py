"""An exception that comes after a program has consumed the state, and before the new one is kept.

Cleanup leaves that state alone, so that whoever called sees the exception itself; and the engine
says that it cannot go on.
"""

import numpy as np
import pytest

from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.events import NewTokens
from dhisparse_jax.engine.forced import forced_logits
from dhisparse_jax.engine.replay import Arrival, Clock, replay
from dhisparse_jax.errors import UserError
from tests.support.serving import CHUNK, config, model, prompt, request

LOST = "the engine was interrupted in the middle of its work, and its state is lost; make a new one"


class Killed(BaseException):
    """As KeyboardInterrupt, which would stop pytest."""


@pytest.fixture(scope="module")
def programs():
    """Compiled once; the engines of this module share them."""
    return Engine(*model(), config("fixed", 4), chunk=CHUNK).compiled


@pytest.fixture
def served(programs):
    """An engine of which one program is killed at its return, when its arguments are gone."""
    made = Engine(*model(), config("fixed", 4), chunk=CHUNK)
    made.compiled = programs
    return made


def kill(monkeypatch, programs, name):
    program = getattr(programs, name)

    def killed(*arguments):
        program(*arguments)
        raise Killed(name)

    monkeypatch.setattr(programs, name, killed)


def used(served):
    for use in (
        lambda: list(served.run([request(5, 2, seed=1)])),
        lambda: served.submit(request(5, 2, seed=1)),
        lambda: list(served.advance()),
        lambda: served.preempt(0),
        lambda: served.save(0),
    ):
        with pytest.raises(UserError) as refused:
            use()
        assert str(refused.value) == LOST
    assert not served.cancel(0)


@pytest.mark.parametrize("name", ["step", "join", "admit", "leave", "set_text"])
def test_run_raises_what_came_and_cannot_go_on(served, programs, monkeypatch, name):
    kill(monkeypatch, programs, name)
    with pytest.raises(Killed, match=name):
        list(served.run([request(20, 3, seed=1), request(30, 3, seed=2)]))
    used(served)


def test_replay_raises_what_came(served, programs, monkeypatch):
    kill(monkeypatch, programs, "step")
    with pytest.raises(Killed, match="step"):
        list(replay(served, [Arrival(0.0, request(20, 3, seed=1))], Clock(virtual=True)))
    used(served)


@pytest.mark.parametrize("name", ["join", "forward", "finish"])
def test_known_texts_likewise(served, programs, monkeypatch, name):
    kill(monkeypatch, programs, name)
    with pytest.raises(Killed, match=name):
        list(forced_logits(served, prompt(20, seed=1), 10))
    used(served)


def test_what_is_raised_between_two_events_breaks_nothing(served):
    item = request(20, 3, seed=1)
    tokens = lambda: [e.tokens for e in served.run([item]) if isinstance(e, NewTokens)]
    expected = tokens()
    iteration = served.run([item])
    next(iteration)
    iteration.close()
    with pytest.raises(Killed):
        for _ in served.run([item]):
            raise Killed
    assert tokens() == expected
    assert not np.asarray(served.state.active).any()
