"""The policy changes what is fetched, never what is written."""

import pytest

from dhisparse_jax.hierarchy.invariants import check_invariants
from tests.support.serving import CONTEXT, POLICIES, config, engine, request, run

# Lengths around K, the tail, the chunk, and the context; more requests than rows.
REQUESTS = [
    request(5, 30),
    request(40, 20, seed=1),
    request(CONTEXT - 4, 30, seed=2),
    request(1, 50, seed=3),
    request(33, 1, seed=4),
    request(16, 25, seed=5),
    request(CONTEXT - 1, 9, seed=6),
]


@pytest.fixture(scope="module")
def runs():
    return {name: run(engine(*policy), REQUESTS) for name, policy in POLICIES.items()}


@pytest.mark.parametrize("name", ["fixed", "adaptive"])
def test_same_tokens(runs, name):
    assert runs[name].tokens == runs["resident"].tokens
    assert runs[name].finished == runs["resident"].finished


def test_tokens_are_worth_comparing(runs):
    """Not a model that repeats itself: many different tokens, different for every request."""
    tokens = runs["resident"].tokens
    assert len({token for sequence in tokens.values() for token in sequence}) > 20
    assert len({tuple(sequence[:4]) for sequence in tokens.values()}) == len(tokens)


def test_same_tokens_alone_and_in_a_batch(runs):
    alone = engine("resident", 1, requests=1)
    assert run(alone, REQUESTS).tokens == runs["resident"].tokens


def test_lengths_and_reasons(runs):
    for number, asked in enumerate(REQUESTS):
        room = CONTEXT - len(asked.prompt)
        assert len(runs["fixed"].tokens[number]) == min(asked.max_new_tokens, room)
        reason = "length" if asked.max_new_tokens <= room else "context"
        assert runs["fixed"].finished[number] == reason


def test_resident_never_fetches(runs):
    assert runs["resident"].total.fetched_rows == 0
    assert runs["resident"].total.host_bytes_read == 0


def test_small_budget_fetches(runs):
    assert runs["fixed"].total.fetched_rows > runs["fixed"].total.hit_rows
    # Adaptive has six times the pages here, and shares them out.
    assert 0 < runs["adaptive"].total.fetched_rows < runs["fixed"].total.fetched_rows / 2


def test_selection_is_the_same(runs):
    """The same number of rows is selected in every step, wherever they are found."""
    selected = {name: [step.selected_rows for step in of.steps] for name, of in runs.items()}
    assert selected["fixed"] == selected["resident"] == selected["adaptive"]
    assert all(selected["resident"])


@pytest.mark.parametrize("name", POLICIES)
def test_metrics_add_up(runs, name):
    record = 4 * config(*POLICIES[name]).record_words(0)
    for step in runs[name].steps:
        assert step.selected_rows == step.hit_rows + step.tail_rows + step.fetched_rows
        # A fetched record has one row in pool 0 and two in pool 1; both are padded to 128 bytes.
        assert step.fetched_rows * record / 2 <= step.host_bytes_read <= step.fetched_rows * record
        assert step.host_bytes_read % record == 0


@pytest.mark.parametrize("name", POLICIES)
def test_invariants_hold_in_every_step(name):
    served = engine(*POLICIES[name])
    failed = []

    def check():
        report = check_invariants(served.state, served.cfg)
        failed.extend(key for key, holds in report.items() if not holds)

    run(served, REQUESTS[:5], after_step=check)
    assert failed == []
