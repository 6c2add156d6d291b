"""Requests: how they end, what is refused, and what stays behind."""

import pytest

from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.events import Finished, NewTokens, PrefillProgress, StepDone
from dhisparse_jax.engine.request import Request
from dhisparse_jax.errors import UserError
from tests.support.serving import CHUNK, CONTEXT, config, engine, is_idle, model, request, run

FIXED = ("fixed", 4)


def asked(prompt, **options):
    return Request(name="it", prompt=prompt, max_new_tokens=4, **options)


def test_stop_token_ends_a_request():
    served, plain = engine(*FIXED), request(12, 20)
    tokens = run(served, [plain]).tokens[0]
    stop = tokens[6]
    stopped = run(served, [request(12, 20, stop=(stop, 1000))])
    assert stopped.tokens[0] == tokens[: tokens.index(stop) + 1]
    assert stopped.finished == {0: "stop"}


def test_stop_token_from_prefill():
    served = engine(*FIXED)
    first = run(served, [request(12, 1)]).tokens[0][0]
    stopped = run(served, [request(12, 9, stop=(first,))])
    assert stopped.tokens[0] == [first]
    assert stopped.finished == {0: "stop"}
    assert stopped.steps == []


def test_one_new_token_needs_no_step():
    result = run(engine(*FIXED), [request(12, 1)])
    assert result.finished == {0: "length"}
    assert result.steps == []


@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT - 2, CONTEXT - 7])
def test_context_ends_a_request(length):
    result = run(engine(*FIXED), [request(length, 50)])
    assert len(result.tokens[0]) == CONTEXT - length
    assert result.finished == {0: "context"}


def test_events_of_one_request():
    """Prefill, its first token, then a step and a token each, then the end."""
    length, new = 2 * CHUNK + 1, 3
    events = list(engine(*FIXED).run([request(length, new)]))
    prefill = [event for event in events if isinstance(event, PrefillProgress)]
    pieces = 3 * 2  # chunks, pools
    assert prefill == [PrefillProgress(0, done + 1, pieces) for done in range(pieces)]
    rest = [type(event) for event in events[pieces:]]
    assert rest == [NewTokens, StepDone, NewTokens, StepDone, NewTokens, Finished]
    steps = [event.step for event in events if isinstance(event, StepDone)]
    assert steps == [1, 2]


def test_waiting_requests_start_in_order():
    events = list(engine(*FIXED).run([request(4, n) for n in (5, 2, 9, 3, 3)]))
    started = [e.request for e in events if isinstance(e, PrefillProgress) and e.done == 1]
    assert started == [0, 1, 2, 3, 4]
    # Request 1 ends first, and only then is there a row for request 3.
    ended = events.index(Finished(1, "length"))
    assert ended < events.index(PrefillProgress(3, 1, 2))


def test_no_requests():
    assert list(engine(*FIXED).run([])) == []


@pytest.mark.parametrize("events", [1, 3, 8, 20])
def test_giving_up_frees_the_rows(events):
    """1 stops in the first prefill, 3 in a later one, the others while decoding."""
    served = engine(*FIXED)
    stream = served.run([request(20, 30), request(40, 30, seed=1)])
    for _ in range(events):
        next(stream)
    assert not is_idle(served)
    stream.close()
    assert is_idle(served)
    again = [request(33, 10, seed=5), request(8, 10, seed=6)]
    assert run(served, again).tokens == run(engine("resident", 1), again).tokens


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 5])
def test_prompt_too_long(length):
    served = engine(*FIXED)
    with pytest.raises(UserError, match=f"{length} tokens, the context is {CONTEXT}.*at most 95"):
        list(served.run([request(4, 1), asked((1,) * length)]))
    assert is_idle(served)


@pytest.mark.parametrize("token", [61, 1000, -1])
def test_token_outside_the_vocabulary(token):
    with pytest.raises(UserError, match=f"it: token {token} is outside the vocabulary of 61"):
        list(engine(*FIXED).run([asked((3, token, 60))]))


def test_largest_token_is_inside():
    run(engine(*FIXED), [asked((60, 0))])


def test_empty_prompt():
    with pytest.raises(UserError, match="prompt is empty"):
        asked(())


@pytest.mark.parametrize("new", [0, -3])
def test_nothing_to_do(new):
    with pytest.raises(UserError, match=f"max-new-tokens is {new}"):
        Request(name="it", prompt=(1,), max_new_tokens=new)


def test_capacity_beyond_the_context():
    served, params = model()
    cfg = config("fixed", 4)
    object.__setattr__(cfg, "capacity", CONTEXT + 1)
    with pytest.raises(UserError, match=f"capacity of {CONTEXT + 1} .* context of {CONTEXT}"):
        Engine(served, params, cfg)
