"""Cancel, finish, preempt and out-of-pages at every stage: the right tokens, and counters at zero.

Out of pages: requests of higher priority need nearly all host pages, so that whoever has begun
leaves them, as a session.
"""

import dataclasses
from functools import cache

import numpy as np
import pytest

from dhisparse_jax.engine.events import NewTokens, PrefillProgress
from dhisparse_jax.engine.exchange import Paged, session_bytes
from dhisparse_jax.engine.session import Session
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy.invariants import check_invariants
from tests.support.jobs import Heard, alone, assert_baseline, assert_pages_counted, drain
from tests.support.serving import POLICIES, drafted, engine, prompt, request
from tests.support.toy_draft import toy_draft

MINE, OTHERS = request(40, 25, seed=2), [request(20, 30, seed=1), request(33, 28, seed=3)]
URGENT = [request(82, 13, seed=9), request(83, 12, seed=10)]
HOST_PAGES = 13
"""Pages of 16: 4 for each of the three requests, 6 for each of the urgent ones."""


@cache
def expected(item):
    return alone(item)


@cache
def served():
    """Adaptive residency, a draft, and host memory for all of them but the urgent ones."""
    texts = [[*item.prompt, *expected(item)] for item in (MINE, *OTHERS, *URGENT)]
    draft = toy_draft(texts, length=3)
    return drafted("adaptive", 32, draft, sizes={"host_pages": HOST_PAGES})


class Run:
    """A run up to a stage of one request, the last of three but where it is to come first."""

    def __init__(self, item=MINE):
        self.served, self.heard = served(), Heard()
        self.served.sharing.forget()
        self.item, self.mine, self.others = item, None, []

    def submit(self):
        """Behind all others, whenever they come."""
        self.mine = self.served.submit(self.item, priority=-1)

    def join(self):
        self.others = [self.served.submit(item) for item in OTHERS]

    def until(self, reached):
        """Work until a request is where it is to be, in the middle of a round."""
        for _ in range(200):
            for event in self.served.advance():
                self.heard.add(event)
                if reached(event):
                    return
        raise AssertionError("the stage was not reached")

    @property
    def job(self):
        return self.served._roster.jobs[self.mine]

    def budget(self):
        return int(np.asarray(self.served.state.budget)[:, self.job.row].sum())

    def check(self):
        found = check_invariants(self.served.state, self.served.cfg)
        if any(job.prefill is not None for job in self.served._roster):
            del found["tail_equals_host"], found["keys_equal_host"]
        assert all(found.values()), found
        assert_pages_counted(self.served)

    def end(self):
        """All but what was cancelled have their tokens, and nobody holds anything."""
        for _ in range(400):
            if self.served.idle:
                break
            for event in self.served.advance():
                self.heard.add(event)
            self.check()
        assert_baseline(self.served)
        for number, item in zip(self.others, OTHERS, strict=False):
            assert self.heard.tokens[number] == expected(item)


def waiting(run):
    """All rows are taken by others."""
    run.others = [run.served.submit(item) for item in (*OTHERS, request(5, 20, seed=4))]
    run.until(lambda event: run.heard.tokens.get(run.others[-1]))
    run.submit()


def prefill(run):
    run.join()
    run.until(lambda event: len(run.heard.tokens) == 2)
    run.submit()
    run.until(lambda event: isinstance(event, PrefillProgress) and event.request == run.mine)


def verify(run):
    """The next block is on its way to being verified."""
    run.join()
    run.submit()
    mine = lambda event: isinstance(event, NewTokens) and event.request == run.mine
    run.until(lambda event: mine(event) and len(run.heard.tokens[run.mine]) > 1)
    assert run.served._flight is not None


def growing(run):
    """It is alone, and gets more pages from step to step."""
    run.submit()
    before = []

    def grown(event):
        if run.job.decoding:
            before.append(run.budget())
        return before and before[-1] > before[0]

    run.until(grown)
    run.join()


def shrinking(run):
    """Others have come, and took some of its pages."""
    run.submit()
    run.until(lambda event: len(run.heard.tokens.get(run.mine, ())) > 1)
    before = run.budget()
    run.join()
    run.until(lambda event: run.budget() < before)


STAGES = [waiting, prefill, verify, growing, shrinking]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_cancel(stage):
    run = Run()
    stage(run)
    assert run.served.cancel(run.mine)
    run.check()
    run.end()
    assert run.heard.finished[run.mine] == "cancelled"


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_preempt(stage):
    """What it has in host memory stays there, and nothing else."""
    run = Run()
    stage(run)
    begun = run.job.decoding
    assert run.served.preempt(run.mine) == (stage is not waiting)
    assert isinstance(run.job.outside, Paged) == begun
    run.check()
    run.end()
    assert run.heard.tokens[run.mine] == expected(MINE)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_out_of_pages(stage):
    run = Run()
    stage(run)
    urgent = [run.served.submit(item, priority=1) for item in URGENT]
    run.until(lambda event: urgent[1] in run.heard.tokens)
    assert run.job.row is None
    assert isinstance(run.job.outside, Session) == (stage is not waiting)  # prefills end before
    run.check()
    run.end()
    assert run.heard.tokens[run.mine] == expected(MINE)
    assert [run.heard.tokens[n] for n in urgent] == [expected(item) for item in URGENT]


@pytest.mark.parametrize("stage", STAGES[1:], ids=lambda stage: stage.__name__)
def test_finish(stage):
    """It ends with the tokens that it had at the stage, or with its first one."""
    run = Run()
    stage(run)
    count = max(len(run.job.produced), 1)
    run.served.cancel(run.mine)
    run.end()
    run = Run(dataclasses.replace(MINE, max_new_tokens=count))
    stage_or_end(stage, run)
    run.check()
    run.end()
    assert run.heard.finished[run.mine] == "length"
    assert run.heard.tokens[run.mine] == expected(MINE)[:count]


def stage_or_end(stage, run):
    """It may end before it is where it was on its way to."""
    try:
        stage(run)
    except KeyError:
        assert run.mine in run.heard.finished


def test_a_request_that_waits_in_its_pages_is_counted():
    """Its pages are not free, and the bytes that it may take elsewhere are set aside."""
    run = Run()
    verify(run)
    held = run.served.sharing.pages.unused
    assert run.served.preempt(run.mine)
    assert run.served.sharing.pages.unused == held
    reserved = run.served.ledger.parked[run.mine]
    assert reserved == run.served.save(run.mine).nbytes
    assert isinstance(run.job.outside, Paged)
    assert run.served.cancel(run.mine)
    assert run.served.sharing.pages.unused == held + 4
    run.end()


@pytest.mark.parametrize("policy", POLICIES)
def test_session_bytes_are_those_of_the_session(policy):
    one = engine(*POLICIES[policy])
    number = one.submit(request(20, 9, seed=1))
    for _ in range(3):
        list(one.advance())
    session = one.save(number)
    assert session_bytes(one, len(session.text) - 1) == session.nbytes
    drain(one)


def test_what_never_fits_is_refused_at_once():
    """With the numbers, whatever it is that is too large."""
    one = served()
    with pytest.raises(UserError, match=r"96 tokens, the context is 96; .* at most 95"):
        one.submit(request(96, 1))
    few = engine("fixed", 4, host_pages=5)
    with pytest.raises(UserError, match=r"95 positions need 6 pages of 16 .* which has 5; .* 80"):
        few.submit(request(80, 40))
    with pytest.raises(UserError, match="outside the vocabulary"):
        one.submit(dataclasses.replace(MINE, prompt=(*prompt(5), 10**6)))
    with pytest.raises(UserError, match="17 stop tokens; at most 16"):
        one.submit(dataclasses.replace(MINE, stop=tuple(range(17))))
    assert_baseline(one)
    assert_baseline(few)
