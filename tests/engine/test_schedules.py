"""Random schedules: submit, cancel, preempt, save, resume and urgent requests at random times.

After every action the invariants hold; at the end of every schedule all counters are where they
were, and every request has the tokens that it has alone. DHISPARSE_SCHEDULES sets how many
schedules, DHISPARSE_SEED the first of them.
"""

import os
from functools import cache

import numpy as np
import pytest

from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.exchange import Paged
from dhisparse_jax.engine.pace import Limits
from dhisparse_jax.engine.session import Session
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy.invariants import check_invariants
from dhisparse_jax.sampling import Sampling
from tests.support.jobs import Heard, assert_baseline, assert_pages_counted
from tests.support.serving import CHUNK, CONTEXT, POLICIES, config, engine, model, request, run
from tests.support.toy_draft import toy_draft

SCHEDULES = int(os.environ.get("DHISPARSE_SCHEDULES", "98"))
SEED = int(os.environ.get("DHISPARSE_SEED", "0"))
MOST_NEW = 12
LENGTHS = (1, 5, 15, 16, 17, 30, 41, 60, CONTEXT - 3)
KINDS = [*POLICIES, "draft", "pieces", "pages"]
HOST_PAGES = 13


@cache
def texts():
    """The tokens of every prompt, greedy, as long as they are ever asked for."""
    asked = [request(length, MOST_NEW, seed=length) for length in LENGTHS]
    return list(run(engine("resident", 1), asked).tokens.values())


@cache
def served_as(kind):
    """Each policy; a draft, some steps at once and little parking; prefill between the steps.

    And host memory for two of the largest requests.
    """
    if kind in POLICIES:
        return engine(*POLICIES[kind])
    cfg = lambda queries: config(*POLICIES["adaptive"], queries=queries)
    if kind == "pages":
        return engine(*POLICIES["adaptive"], host_pages=HOST_PAGES)
    if kind == "pieces":
        served = Engine(*model(), cfg(1), chunk=CHUNK, limits=Limits(tpot=1e-6))
        served.pace = AnyPace()
        return served
    known = [
        [*request(n, 1, seed=n).prompt, *text] for n, text in zip(LENGTHS, texts(), strict=True)
    ]
    draft, limits = toy_draft(known, length=3), Limits(parking=20_000)
    return Engine(*model(), cfg(4), chunk=CHUNK, draft=draft, steps=2, limits=limits)


DONE = ("cancelled", "preempted", "resumed", "in pages", "out of pages")

SAVED = []
"""Sessions of all engines, (session, place in LENGTHS, most tokens): any may go on in any other."""


class AnyPace:
    """Allows any number of requests, now these, now those, and a piece of prefill at a time."""

    pieces = 1

    def __init__(self):
        self._rng = np.random.default_rng(0)

    @property
    def limit(self):
        return int(self._rng.integers(1, 4))

    def add_pause(self, seconds, piece):
        """Nothing to learn."""

    def add_dispatch(self, gap, counts, verified):
        """Nothing to learn."""


class Schedule:
    """One schedule: what was asked, what came, and what was done to whom."""

    def __init__(self, served, seed):
        self.served, self.rng, self.heard = served, np.random.default_rng(seed), Heard()
        self.resumed = set()
        self.asked = {}  # number: (place in LENGTHS, tokens of before, most tokens)
        self.done = dict.fromkeys(DONE, 0)

    def act(self):
        """One random action."""
        actions = [self.submit, self.cancel, self.preempt, self.save, self.resume]
        chance = [0.45, 0.15, 0.2, 0.1, 0.1]
        actions[self.rng.choice(len(actions), p=chance)]()

    def submit(self):
        place, new = int(self.rng.integers(len(LENGTHS))), int(self.rng.integers(1, MOST_NEW + 1))
        asked = request(LENGTHS[place], new, seed=LENGTHS[place])
        number = self.served.submit(asked, priority=int(self.rng.random() < 0.2))
        self.asked[number] = (place, [], new)

    def someone(self):
        """One of the latest requests, which may have ended, or one that never was."""
        return int(self.rng.choice([*list(self.asked)[-5:], 10**6]))

    def cancel(self):
        self.done["cancelled"] += self.served.cancel(self.someone())

    def preempt(self):
        number = self.someone()
        if self.served.preempt(number):
            self.done["preempted"] += 1
            outside = self.served._roster.jobs[number].outside
            self.done["in pages"] += isinstance(outside, Paged)

    def save(self):
        for number in self.asked:
            job = self.served._roster.jobs.get(number)
            if job is not None and (job.decoding or job.outside is not None):
                place, _, most = self.asked[number]
                try:
                    SAVED.append((self.served.save(number), place, most))
                except UserError:
                    assert job.reason is not None, "it ended in the step that was under way"
                return

    def resume(self):
        if SAVED:
            session, place, most = SAVED[-1 - int(self.rng.integers(min(len(SAVED), 20)))]
            number = self.served.resume(session)
            self.asked[number] = (place, list(session.produced), most)
            self.done["resumed"] += 1
            self.resumed.add(number)

    def listen(self, act=True):
        """One round of work; now and then something happens in the middle of it."""
        for event in self.served.advance():
            self.heard.add(event)
            if self.rng.random() < 0.05 and act:
                self.act()
            if self.rng.random() < 0.02:
                return  # the round goes on in the next one

    def check(self):
        state = check_invariants(self.served.state, self.served.cfg)
        if any(job.prefill is not None for job in self.served._roster):
            del state["tail_equals_host"]  # its newest positions are in no tail yet,
            del state["keys_equal_host"]  # nor are its keys everywhere
        assert all(state.values()), state
        outside = {n: job.outside for n, job in self.served._roster.jobs.items()}
        self.done["out of pages"] += any(
            isinstance(it, Session) and n not in self.resumed for n, it in outside.items()
        )
        assert_pages_counted(self.served)

    def finish(self):
        """Everybody ends, with the right tokens."""
        for _ in range(600):
            if self.served.idle:
                break
            self.listen(act=False)
        assert_baseline(self.served)
        assert set(self.heard.finished) == set(self.asked)
        for number, (place, before, most) in self.asked.items():
            expected = texts()[place][: min(most, CONTEXT - LENGTHS[place])]
            tokens = before + self.heard.tokens.get(number, [])
            if self.heard.finished[number] == "cancelled":
                expected = expected[: len(tokens)]
            assert (number, tokens) == (number, expected)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow) if k == "resident" else k for k in KINDS]
)
def test_random_schedules(kind):
    total = dict.fromkeys(DONE, 0)
    for seed in range(SEED, SEED + SCHEDULES // len(KINDS)):
        schedule = Schedule(served_as(kind), seed)
        for _ in range(int(schedule.rng.integers(2, 12))):
            schedule.act()
            schedule.listen()
            schedule.check()
        schedule.finish()
        total = {name: total[name] + count for name, count in schedule.done.items()}
    assert total.pop("out of pages") > 0 or SCHEDULES < 100 or kind != "pages", total
    assert SCHEDULES < 100 or min(total.values()) > SCHEDULES // len(KINDS) // 10, total


def test_sampled_tokens_do_not_depend_on_the_load():
    """As above with draws: they depend on seed and position alone."""
    served = engine(*POLICIES["fixed"])
    asked = [
        request(20 + n, 10, seed=n, sampling=Sampling(temperature=1.0, seed=n)) for n in range(4)
    ]
    alone = [run(served, [item]).tokens[0] for item in asked]
    heard, numbers = Heard(), [served.submit(item) for item in asked]
    for turn in range(12):
        for event in served.advance():
            heard.add(event)
        served.preempt(numbers[turn % 4])
    while not served.idle:
        for event in served.advance():
            heard.add(event)
    assert [heard.tokens[number] for number in numbers] == alone
    assert len({tuple(tokens) for tokens in alone}) == 4
