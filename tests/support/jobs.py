"""Requests in an engine that others come to and leave: what each produces, and what stays."""

import dataclasses

import jax
import numpy as np

from dhisparse_jax.engine.events import Finished, NewTokens
from dhisparse_jax.engine.exchange import Paged
from tests.support.serving import engine, is_idle, run


@dataclasses.dataclass
class Heard:
    """What an engine reported of each request, by number."""

    tokens: dict = dataclasses.field(default_factory=dict)
    finished: dict = dataclasses.field(default_factory=dict)

    def add(self, event):
        match event:
            case NewTokens(number, tokens):
                self.tokens.setdefault(number, []).extend(tokens)
            case Finished(number, reason):
                assert number not in self.finished
                self.finished[number] = reason


def drain(served, heard=None, rounds=400):
    """Work until nothing is left; the state must be empty then."""
    heard = heard or Heard()
    for _ in range(rounds):
        if served.idle:
            break
        for event in served.advance():
            heard.add(event)
    assert_baseline(served)
    return heard


def assert_pages_counted(served):
    """Every host page has as many users as there are requests that hold it."""
    users = np.zeros(served.cfg.host_page_count, int)
    for job in served._roster.jobs.values():
        if job.row is not None or isinstance(job.outside, Paged):
            holding = served._roster._holding(job)
            users[holding.pages] += 1
            users[holding.copied] += 1
    assert served.sharing.pages.users.tolist() == users.tolist()


def assert_baseline(served):
    """Every counter is where it was before the first request."""
    assert served.idle
    assert served.ledger.idle
    assert served.counts == (0, 0)
    assert is_idle(served)
    rate = jax.device_get(served.state.miss_rate)
    assert not rate.any()


def alone(request):
    """The tokens of a request that runs by itself, with all history on the device."""
    return run(engine("resident", 1), [request]).tokens[0]
