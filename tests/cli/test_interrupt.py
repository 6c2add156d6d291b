"""An interrupt that a callback swallowed still ends the run."""

import contextlib
import os
import signal

import pytest

from dhisparse_jax.cli.interrupt import interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_swallowed_interrupt_is_raised_at_the_next_check(number):
    before = signal.getsignal(number)
    with interrupts() as check:
        check()
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(number) is before
