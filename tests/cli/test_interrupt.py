"""The first signal waits for a check, the second does not."""

import os
import signal

import pytest

from dhisparse_jax.cli import interrupt
from dhisparse_jax.cli.interrupt import interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_raised_at_the_next_check(number, capfd):
    before = signal.getsignal(number)
    with interrupts() as check:
        check()
        os.kill(os.getpid(), number)
        assert "stopping after this step" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(number) is before


def test_the_second_signal_is_raised_at_once():
    with interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_that_comes_twice_at_once_is_one(monkeypatch):
    now = 7.0
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now)
    with interrupts() as check:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            check()
        now += 2 * interrupt.ECHO_SECONDS
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
