"""Submit, cancel, preempt, save and resume: tokens stay the same, counters come back."""

import dataclasses

import pytest

from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.events import Finished, NewTokens, PrefillProgress
from dhisparse_jax.engine.ledger import Ledger
from dhisparse_jax.engine.pace import Limits, Pace
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy.invariants import check_invariants
from dhisparse_jax.sampling import Sampling
from tests.support.jobs import Heard, alone, assert_baseline, drain
from tests.support.serving import CHUNK, POLICIES, config, drafted, engine, model, request
from tests.support.toy_draft import toy_draft

SAMPLED = Sampling(temperature=0.9, seed=7)
REQUESTS = [
    request(20, 30, seed=1),
    request(40, 25, seed=2, sampling=SAMPLED),
    request(33, 28, seed=3),
    request(9, 40, seed=4, sampling=SAMPLED),
]


@pytest.fixture(scope="module")
def expected():
    return [alone(item) for item in REQUESTS]


def tokens_of(heard, numbers):
    return [heard.tokens[number] for number in numbers]


def advance(served, heard, rounds):
    for _ in range(rounds):
        for event in served.advance():
            heard.add(event)


@pytest.mark.parametrize("policy", POLICIES)
def test_submitted_one_after_another(policy, expected):
    served, heard, numbers = engine(*POLICIES[policy]), Heard(), []
    for item in REQUESTS:
        numbers.append(served.submit(item))
        advance(served, heard, 3)
    drain(served, heard)
    assert tokens_of(heard, numbers) == expected
    assert [heard.finished[number] for number in numbers] == ["length"] * 4


@pytest.mark.parametrize("policy", POLICIES)
def test_preempted_requests_go_on_with_the_same_tokens(policy, expected):
    served, heard = engine(*POLICIES[policy]), Heard()
    numbers = [served.submit(item) for item in REQUESTS]
    preempted = 0
    for turn in range(40):
        advance(served, heard, 1)
        preempted += served.preempt(numbers[turn % 4])
        assert all(check_invariants(served.state, served.cfg).values())
    drain(served, heard)
    assert preempted > 10
    assert tokens_of(heard, numbers) == expected


@pytest.mark.slow
def test_preempted_with_a_draft(expected):
    texts = [[*item.prompt, *tokens] for item, tokens in zip(REQUESTS, expected, strict=True)]
    greedy = [n for n, item in enumerate(REQUESTS) if item.sampling == Sampling()]
    served = drafted(*POLICIES["adaptive"], toy_draft(texts, length=3), steps=2)
    heard, numbers = Heard(), [served.submit(REQUESTS[n]) for n in greedy]
    for turn in range(8):
        advance(served, heard, 1)
        served.preempt(numbers[turn % 2])
    drain(served, heard)
    assert tokens_of(heard, numbers) == [expected[n] for n in greedy]


def test_a_preempted_row_serves_another():
    served, heard = engine(*POLICIES["fixed"]), Heard()
    numbers = [served.submit(item) for item in REQUESTS]
    advance(served, heard, 1)
    assert numbers[3] not in heard.tokens
    assert served.preempt(numbers[0])
    assert served.counts == (2, 2)
    advance(served, heard, 1)
    assert numbers[3] in heard.tokens
    assert served.counts == (3, 1)
    assert list(served.ledger.parked) == [numbers[0]]
    drain(served, heard)


def test_higher_priority_takes_the_place_of_the_last(expected):
    served, heard = engine(*POLICIES["adaptive"]), Heard()
    numbers = [served.submit(item) for item in REQUESTS[:3]]
    advance(served, heard, 4)
    urgent = served.submit(REQUESTS[3], priority=1)
    advance(served, heard, 1)
    assert list(served.ledger.parked) == [numbers[2]]
    assert heard.tokens[urgent]
    drain(served, heard)
    assert tokens_of(heard, [*numbers, urgent]) == expected


def test_equal_priority_waits():
    served, heard = engine(*POLICIES["adaptive"]), Heard()
    numbers = [served.submit(request(8, 5 + n, seed=n)) for n in range(5)]
    drain(served, heard)
    assert [*heard.finished] == numbers
    assert not served.ledger.parked


def test_no_parking_memory_no_preemption(expected):
    served = Engine(*model(), config(*POLICIES["fixed"]), chunk=CHUNK, limits=Limits(parking=1000))
    heard, numbers = Heard(), [served.submit(item) for item in REQUESTS[:2]]
    advance(served, heard, 3)
    assert not served.preempt(numbers[0])
    assert served.counts == (2, 0)
    drain(served, heard)
    assert tokens_of(heard, numbers) == expected[:2]


STAGES = {
    "waiting": None,
    "first piece": (PrefillProgress, 1),
    "mid-prefill": (PrefillProgress, 3),
    "first token": (NewTokens, 1),
    "mid-verify": (NewTokens, 4),
}
"""Until how many of which events: from the second token on, the next step is under way."""


def reach(served, heard, number, stage):
    """Work until a request has got so many of these events."""
    kind, left = stage
    while left:
        for event in served.advance():
            heard.add(event)
            left -= isinstance(event, kind) and event.request == number
            if not left:
                return


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("act", ["cancel", "preempt"])
@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_at_every_stage(policy, act, stage, expected):
    """Others go on with their tokens, and every counter comes back."""
    served, heard = engine(*POLICIES[policy]), Heard()
    other = served.submit(REQUESTS[0])
    advance(served, heard, 2)
    number = served.submit(REQUESTS[1])
    if stage:
        reach(served, heard, number, stage)
    assert (served._flight is not None) == (stage in (None, STAGES["mid-verify"]))
    done = getattr(served, act)(number)
    assert done == (act == "cancel" or stage is not None)
    assert served.counts == ((1, 0) if act == "cancel" else (1, 1))
    drain(served, heard)
    assert heard.tokens[other] == expected[0]
    if act == "preempt":
        assert heard.tokens[number] == expected[1]
    else:
        assert heard.finished[number] == "cancelled"


def test_cancel_while_parked_or_finished():
    served, heard = engine(*POLICIES["fixed"]), Heard()
    numbers = [served.submit(item) for item in REQUESTS]
    advance(served, heard, 2)
    served.preempt(numbers[0])
    assert served.cancel(numbers[0])
    drain(served, heard)
    assert heard.finished[numbers[0]] == "cancelled"
    assert not any(served.cancel(number) for number in (*numbers, 1000))
    assert served.idle


def test_cancel_between_the_tokens_of_one_dispatch():
    """What was computed already is not delivered any more."""
    served = Engine(*model(), config(*POLICIES["fixed"]), chunk=CHUNK, steps=4)
    first, second = (served.submit(item) for item in REQUESTS[:2])
    heard = Heard()
    while not served.idle:
        for event in served.advance():
            heard.add(event)
            if isinstance(event, NewTokens) and len(event.tokens) > 1:
                served.cancel(second)
    assert heard.finished == {first: "length", second: "cancelled"}
    assert len(heard.tokens[second]) == 1  # its prefill's
    assert_baseline(served)


def test_a_round_that_nobody_listens_to_the_end_goes_on():
    """Even if it stops between the last tokens of a request and its end."""
    served = engine(*POLICIES["fixed"])
    number = served.submit(request(8, 1))
    stream = served.advance()
    assert any(isinstance(event, NewTokens) for event in stream)
    stream.close()
    assert list(served.advance()) == [Finished(number, "length")]
    assert_baseline(served)


def test_prefill_between_steps(expected):
    """With a bound, a prompt enters piece by piece while others decode."""
    served = Engine(*model(), config(*POLICIES["adaptive"]), chunk=4, limits=Limits(tpot=1e3))
    served.pace = OnePiece()
    heard, kinds = Heard(), []
    numbers = [served.submit(REQUESTS[0])]
    advance(served, heard, 2)
    numbers.append(served.submit(REQUESTS[1]))
    while numbers[1] not in heard.tokens:
        for event in served.advance():
            heard.add(event)
            kinds.append(type(event))
        found = check_invariants(served.state, served.cfg)
        # The newest positions of a prompt are in no tail before their group is prefilled.
        assert {name for name, held in found.items() if not held} <= {
            "tail_equals_host",
            "keys_equal_host",
        }
    pieces = kinds.count(PrefillProgress)
    assert pieces == 2 * 10
    assert kinds.count(NewTokens) >= pieces - 2
    drain(served, heard)
    assert tokens_of(heard, numbers) == expected[:2]


class OnePiece(Pace):
    """Three requests, and a piece of prefill at a time."""

    pieces = 1

    def __init__(self):
        super().__init__(3)


def test_save_and_resume(expected):
    """On the same policy and on another, with and without a draft."""
    served, heard = engine(*POLICIES["adaptive"]), Heard()
    numbers = [served.submit(item) for item in REQUESTS[:2]]
    advance(served, heard, 6)
    delivered = tokens_of(heard, numbers)
    saved = [served.save(number) for number in numbers]
    before = [list(session.produced) for session in saved]
    for produced, known in zip(before, delivered, strict=True):
        assert len(produced) == len(known) + 1, "the step under way belongs to the session"
    drain(served, heard)
    assert tokens_of(heard, numbers) == expected[:2]
    texts = [[*item.prompt, *tokens] for item, tokens in zip(REQUESTS, expected, strict=True)]
    for other in (served, engine("resident", 1), drafted("fixed", 4, toy_draft(texts))):
        resumed = [other.resume(session) for session in saved[: 1 + (other.drafter.length == 0)]]
        after = drain(other)
        for place, number in enumerate(resumed):
            assert before[place] + after.tokens[number] == expected[place]


def test_resume_with_more_tokens():
    served, heard = engine(*POLICIES["fixed"]), Heard()
    number = served.submit(request(20, 8, seed=1))
    advance(served, heard, 4)
    session = served.save(number)
    drain(served)
    more = served.resume(session, max_new_tokens=30)
    after = drain(served)
    assert [*session.produced, *after.tokens[more]] == alone(request(20, 30, seed=1))
    with pytest.raises(UserError, match="has produced 5 tokens of 5; raise max-new-tokens"):
        served.resume(session, max_new_tokens=5)


def test_sessions_that_do_not_fit():
    served, heard = engine(*POLICIES["fixed"]), Heard()
    number = served.submit(request(20, 8, seed=1))
    with pytest.raises(UserError, match="has not begun; submit it again"):
        served.save(number)
    advance(served, heard, 2)
    session = served.save(number)
    drain(served)
    with pytest.raises(UserError, match="no request"):
        served.save(number)
    with pytest.raises(UserError, match="session is of model nobody, this is"):
        served.resume(dataclasses.replace(session, model="nobody"))
    with pytest.raises(UserError, match="records and keys of 2 and 1 pools; the model has 2"):
        served.resume(dataclasses.replace(session, keys=session.keys[:1]))
    assert_baseline(served)


def test_ledger_counts_rows():
    """Every row can be had, whatever the others hold above their floor; one more cannot."""
    cfg = config(*POLICIES["adaptive"])
    ledger = Ledger.of(cfg, 100)
    for number in range(cfg.requests):
        assert ledger.fits()
        ledger.enter(number)
    assert not ledger.fits()
    assert ledger.fits(without=(1,))
    assert ledger.can_park(100)
    ledger.park(1, 70)
    assert ledger.fits()
    assert not ledger.can_park(31)
    ledger.enter(1)
    assert ledger.can_park(100)
    for number in range(cfg.requests):
        ledger.leave(number)
    assert ledger.idle


def test_run_wants_the_engine_for_itself():
    served = engine(*POLICIES["fixed"])
    number = served.submit(request(8, 5))
    with pytest.raises(UserError, match="1 requests are in the engine"):
        next(served.run([request(8, 5)]))
    served.cancel(number)
    assert list(served.advance()) == [Finished(number, "cancelled")]
    assert_baseline(served)
