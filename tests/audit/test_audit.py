"""The audit proves a sound engine, and names where a fault that was planted in one first shows.

Faults are planted between the jitted functions of an engine: what `compiled` holds is replaced.
"""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.audit.findings import Difference, Level
from dhisparse_jax.audit.greedy import Written, compare_tokens, count_proposals, write
from dhisparse_jax.audit.levels import (
    Levels,
    Subjects,
    audit,
    compare_dense,
    first_context,
    prefilled,
    written_texts,
)
from dhisparse_jax.audit.lockstep import lockstep
from dhisparse_jax.audit.observe import Subject
from dhisparse_jax.audit.outputs import compare_outputs
from dhisparse_jax.audit.records import Sizes, compare_records
from dhisparse_jax.audit.rehearsed import Rehearsed, rehearsed
from dhisparse_jax.audit.sampled import _chi_square, asking, draw_tokens, enumerate_rule
from dhisparse_jax.hierarchy import group, layout, retrieve
from dhisparse_jax.hierarchy.invariants import host_rows
from dhisparse_jax.speculation import accept as rules
from tests.support.mutants import always, best_after_all, one_chance, own_row, soft_as_hard
from tests.support.serving import drafted, engine, is_idle, model, request

REQUESTS = [request(40, 24, seed=1), request(5, 20, seed=2), request(33, 24, seed=3)]
NAMES = [asked.name for asked in REQUESTS]
STEP = 2
"""The step in which faults are planted, in row 0."""

CHECK = lambda: None


@cache
def subjects():
    """Engines that compile once; the draft knows the texts."""
    plain = engine("resident", 1)
    texts = written_texts(plain, REQUESTS, CHECK)
    draft = rehearsed(model()[0].vocabulary, [text.tokens for text in texts], 3)
    audited = Subject(drafted("fixed", 4, draft))
    like = Subject(engine("resident", 1, queries=4))
    return Subjects(plain, audited, like, audited.engine), texts


@pytest.fixture(autouse=True, scope="module")
def _compiled():
    """What all tests use, so that none of them pays for it."""
    steps()


def steps(audited=None):
    """E0 and E1 of the steps, and the length and what was accepted in row 0 in step STEP."""
    of, texts = subjects()
    audited = audited or of.audited
    sizes = Sizes(of.audited.engine.cfg, of.resident.engine.cfg)
    e0, e1, where = Level("E0"), Level("E1"), {}
    for pair in lockstep(audited, of.resident, texts):
        compare_records(pair, sizes, e0)
        compare_outputs(pair, e1)
        where[pair.number] = int(pair.start[0]), int(pair.accepted[0])
        if pair.number > STEP + 1:
            break
    return e0, e1, *where[STEP]


# Faults in the state, after a step. Each returns the state and what is to be named.


def put(value, like):
    return jax.device_put(jnp.asarray(value), like.sharding)


def with_pool_leaf(state, pool, **leaves):
    old = state.pools[pool]
    new = dataclasses.replace(old, **{k: put(v, getattr(old, k)) for k, v in leaves.items()})
    pools = tuple(new if number == pool else each for number, each in enumerate(state.pools))
    return dataclasses.replace(state, pools=pools)


def with_hot_leaf(state, **leaves):
    old = state.hot[0]
    new = dataclasses.replace(old, **{k: put(v, getattr(old, k)) for k, v in leaves.items()})
    return dataclasses.replace(state, hot=(new,))


def hot_position(cfg, state, pool=0):
    """A position of row 0 that has a hot slot and none in the tail, and the slot."""
    slot_of = np.array(state.pools[pool].slot_of)[0]
    tail = int(state.length[0]) + cfg.fresh(pool) - cfg.tail
    position = int(np.flatnonzero(slot_of[:tail] >= 0)[0])
    return position, int(slot_of[position])


def host_row(cfg, state, position):
    return int(host_rows(jax.device_get(state), cfg, 0)[0, position])


def stale_host_row(cfg, state):
    """The newest record did not reach host memory."""
    position = int(state.length[0]) - 1
    host = np.array(state.pools[1].host)
    host[host_row(cfg, state, position)] = 7
    return with_pool_leaf(state, 1, host=host), ("host record", 1, position)


def stale_second_layer(cfg, state):
    """Of a record only the row of its second layer is old."""
    position, words = 3, cfg.geometry.row.words
    host = np.array(state.pools[1].host)
    host[host_row(cfg, state, position), words : words + 2] = 7
    return with_pool_leaf(state, 1, host=host), ("host record", 2, position)


def stale_hot_row(cfg, state):
    """A slot that was given to another position still has the old one."""
    position, slot = hot_position(cfg, state)
    slots = np.array(state.hot[0].slots)
    slots[slot] = 7
    return with_hot_leaf(state, slots=slots), ("a record on the device", 0, position)


def position_off_by_one(cfg, state):
    """A slot has the record after the one that it should have."""
    position, slot = hot_position(cfg, state)
    slots = np.array(state.hot[0].slots)
    slots[slot] = np.array(state.pools[0].host)[host_row(cfg, state, position + 1)]
    return with_hot_leaf(state, slots=slots), ("a record on the device", 0, position)


def two_records_in_one_slot(cfg, state):
    slot_of = np.array(state.pools[0].slot_of)
    first, second = np.flatnonzero(slot_of[0] >= 0)[:2].tolist()
    slot_of[0, second] = slot_of[0, first]
    return with_pool_leaf(state, 0, slot_of=slot_of), ("two records in one slot", 0, second)


def rejected_row_with_a_slot(cfg, state):
    """A rejected position took the place of a committed one in the table."""
    slot_of, length = np.array(state.pools[0].slot_of), int(state.length[0])
    position, slot = hot_position(cfg, state)
    slot_of[0, position], slot_of[0, length] = -1, slot
    held = np.array(state.hot[0].position)
    held[slot] = length
    state = with_hot_leaf(with_pool_leaf(state, 0, slot_of=slot_of), position=held)
    return state, ("not committed has a slot", 0, length)


def rejected_row_in_the_tail(cfg, state):
    """The row of a rejected token is where the accepted one should be."""
    position = int(state.length[0]) - 1
    slots = np.array(state.hot[0].slots)
    at = lambda where: int(layout.tail_slot(cfg, 0, jnp.int32(0), jnp.int32(where)))
    slots[at(position)] = slots[at(position + 1)]
    return with_hot_leaf(state, slots=slots), ("a record on the device", 0, position)


def wrong_index_key(cfg, state):
    keys = np.array(state.pools[1].index_keys)
    keys[0, 4] += 1
    return with_pool_leaf(state, 1, index_keys=keys), ("index key", 1, 4)


FAULTS = [
    stale_host_row,
    stale_second_layer,
    stale_hot_row,
    position_off_by_one,
    two_records_in_one_slot,
    rejected_row_with_a_slot,
    rejected_row_in_the_tail,
    wrong_index_key,
]


def plant(monkeypatch, fault, wanted):
    """Replace what ends a step under the policy; `wanted` gets what the fault says."""
    served = subjects()[0].audited.engine
    finish, calls = served.compiled.finish, []

    def faulty(state, accepted):
        calls.append(0)
        state = finish(state, accepted)
        if len(calls) == STEP:
            state, named = fault(served.cfg, state)
            wanted.append(named)
        return state

    monkeypatch.setattr(served.compiled, "finish", faulty)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_named_where_it_is(monkeypatch, fault):
    wanted = []
    plant(monkeypatch, fault, wanted)
    e0, _, _, _ = steps()
    ((what, layer, position),) = wanted
    first = e0.first
    assert e0.verdict == "REFUTED"
    assert what in first.what
    assert (first.request, first.step) == (NAMES[0], STEP)
    assert (first.layer, first.position) == (layer, position)


def test_a_rejected_row_that_is_committed_is_named(monkeypatch):
    served = subjects()[0].audited.engine
    finish, calls = served.compiled.finish, []

    def faulty(state, accepted):
        calls.append(0)
        more = jnp.asarray([len(calls) == STEP, 0, 0], jnp.int32)
        return finish(state, accepted + more)

    monkeypatch.setattr(served.compiled, "finish", faulty)
    e0, e1, start, accepted = steps()
    assert e0.first.what == "a rejected row is committed"
    assert (e0.first.request, e0.first.step) == (NAMES[0], STEP)
    assert e0.first.position == start + accepted
    assert (e1.first.request, e1.first.step) == (NAMES[0], STEP + 1)


def test_outputs_differ_from_the_layer_that_read_wrong_records(monkeypatch):
    def lost(cfg, state):
        host = np.array(state.pools[1].host)
        host[host_rows(jax.device_get(state), cfg, 1)[0, : int(state.length[0])]] ^= 1
        return with_pool_leaf(state, 1, host=host), None

    plant(monkeypatch, lost, [])
    e0, e1, start, accepted = steps()
    assert e0.first.step == STEP
    first = e1.first
    assert (first.request, first.step, first.layer) == (NAMES[0], STEP + 1, 1)
    assert first.position == start + accepted


# Faults in the library's functions, which the step under the policy is compiled with.


def fetch_off_by_one(monkeypatch):
    """Retrieval reads the host row after the one that the plan names."""
    lists = retrieve._lists

    def shifted(*arguments):
        fetches, moves = lists(*arguments)
        return fetches._replace(rows=jnp.where(fetches.rows >= 0, fetches.rows + 1, -1)), moves

    monkeypatch.setattr(retrieve, "_lists", shifted)


def fetch_too_few(monkeypatch):
    """The last record of every list is not fetched: its slot keeps what was there."""
    lists = retrieve._lists

    def fewer(*arguments):
        fetches, moves = lists(*arguments)
        return fetches._replace(counts=jnp.maximum(fetches.counts - 1, 0)), moves

    monkeypatch.setattr(retrieve, "_lists", fewer)


def plan_one_slot_for_two(monkeypatch):
    """The first two selected records are planned to be in the same slot."""
    plan = group.plan

    def merged(*arguments, **options):
        result, state = plan(*arguments, **options)
        location = result.location.at[:, :, 1].set(result.location[:, :, 0])
        return result._replace(location=location), state

    monkeypatch.setattr(group, "plan", merged)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (fetch_off_by_one, "is not its host record"),
        (fetch_too_few, "is not its host record"),
        (plan_one_slot_for_two, "two records in one slot"),
    ],
)
def test_a_fault_of_the_program_is_found_in_the_first_step(monkeypatch, fault, what):
    fault(monkeypatch)
    e0, e1, _, _ = steps(Subject(subjects()[0].audited.engine))
    assert what in e0.first.what
    assert (e0.first.step, e0.first.layer) == (1, 0)
    assert (e1.first.step, e1.first.layer) == (1, 0)
    assert {e0.first.request, e1.first.request} <= set(NAMES)


def test_another_greedy_token_is_named(monkeypatch):
    of, texts = subjects()
    served = of.audited.engine
    step, calls = served.compiled.step, []

    def faulty(*arguments):
        state, output = step(*arguments)
        calls.append(0)
        if len(calls) == STEP:  # the anchor of row 1 is another one
            anchor = np.array(state.texts.anchor)
            anchor[1] = (anchor[1] + 1) % 61
            changed = put(anchor, state.texts.anchor)
            state = dataclasses.replace(
                state, texts=dataclasses.replace(state.texts, anchor=changed)
            )
        return state, output

    monkeypatch.setattr(served.compiled, "step", faulty)
    level = Level("E2")
    written = write(served, REQUESTS)
    new = [text.tokens[text.prompt :] for text in texts]
    compare_tokens(REQUESTS, new, written, level, "without a draft")
    assert level.first.request == NAMES[1]
    assert level.first.step == STEP + 1
    new = texts[1].tokens[texts[1].prompt :]
    at = level.first.position - texts[1].prompt
    assert written.tokens[1][:at] == list(new[:at])
    assert written.tokens[1][at] != new[at]


def test_what_does_not_hold_in_the_engine_is_named(monkeypatch):
    served = subjects()[0].audited.engine
    step, calls = served.compiled.step, []

    def faulty(*arguments):
        state, output = step(*arguments)
        calls.append(0)
        if len(calls) == STEP:
            hierarchy, _ = two_records_in_one_slot(served.cfg, state.hierarchy)
            state = dataclasses.replace(state, hierarchy=hierarchy)
        return state, output

    monkeypatch.setattr(served.compiled, "step", faulty)
    level = Level("E0")
    write(served, REQUESTS, level)
    assert level.first.step == STEP
    assert "maps_agree" in level.first.what


def sampling(check):
    """E3 of the first step, in one of two ways."""
    of, texts = subjects()
    level, served = Level("E3"), of.audited.engine
    pair = next(lockstep(of.audited, of.resident, texts))
    context = first_context(pair, texts)
    check(asking(served, served.draft_state, context), context, level)
    return level


MUTANTS = [
    ("remainder", own_row),
    ("remainder", best_after_all),
    ("standing", soft_as_hard),
    ("standing", always),
]


@pytest.mark.parametrize(
    ("name", "mutant"), MUTANTS, ids=lambda item: getattr(item, "__name__", item)
)
def test_a_biased_acceptance_is_named(monkeypatch, name, mutant):
    monkeypatch.setattr(rules, name, mutant)
    level = sampling(enumerate_rule)
    assert level.verdict == "REFUTED"
    assert level.first.what == "the rule of acceptance is biased"
    assert level.first.request in NAMES
    assert level.first.step == 1


@pytest.mark.parametrize(
    ("name", "mutant", "place"),
    [("standing", always, 0), ("standing", one_chance, 1)],
)
def test_a_biased_acceptance_shows_in_what_is_drawn(monkeypatch, name, mutant, place):
    """In the first place of a block that is wrong: the first of all, or of those after it."""
    monkeypatch.setattr(rules, name, mutant)
    level = sampling(draw_tokens)
    assert level.first.what == "what is drawn has not the model's distribution"
    row = NAMES.index(level.first.request)
    assert level.first.position == len(REQUESTS[row].prompt) + 1 + place


class Liar(Rehearsed):
    """Always proposes its guess, and states a softer q."""

    def propose(self, params, state, anchor, length, sampler):
        honest = super().propose(params, state, anchor, length, sampler)
        return dataclasses.replace(honest, tokens=honest.candidates[:, :, 0])


def test_a_draft_that_draws_from_another_q_is_named(monkeypatch):
    monkeypatch.setattr(subjects()[0].audited.engine, "drafter", Liar(61, 3))
    level = sampling(draw_tokens)
    assert level.first.what == "what is drawn has not the model's distribution"


def test_logits_that_no_prefill_gives_are_named():
    """What is wrong under every policy is seen by what knows nothing of the hierarchy."""
    of, texts = subjects()
    dense = [prefilled(of.resident, text) for text in texts]
    pair = next(lockstep(of.audited, of.resident, texts))
    sound, wrong, unjudged = Level("E0"), Level("E0"), Level("E0")
    compare_dense(pair, dense, sound, judged=True)
    assert sound.verdict == "proved"
    position = int(pair.start[2])
    dense[2][position, 5] += 1.0
    compare_dense(pair, dense, wrong, judged=True)
    compare_dense(pair, dense, unjudged, judged=False)
    assert (wrong.first.request, wrong.first.step) == (NAMES[2], 1)
    assert (wrong.first.layer, wrong.first.position) == (None, position)
    assert unjudged.verdict == "proved"
    assert unjudged.figures == wrong.figures


def test_the_first_of_a_step_is_the_one_in_the_lowest_layer():
    level = Level("E0")
    level.add([])
    level.add([Difference("c"), Difference("b", layer=1, position=0), Difference("a", layer=0)])
    level.add([Difference("later", layer=0, position=0)])
    assert level.first.what == "a"
    assert level.differences == 4
    assert (
        str(Difference("x", "r", 2, 3, 4, "d")) == "request r, step 2, layer 3, position 4: x (d)"
    )
    assert str(Difference("x")) == "somewhere: x"


def test_a_sound_engine_holds_every_promise():
    of, texts = subjects()
    levels = Levels.empty()
    audit(of, REQUESTS, texts, levels, CHECK)
    found = {level.name: level for level in levels}
    assert {name: level.verdict for name, level in found.items()} == dict.fromkeys(found, "proved")
    assert all(level.first is None and level.differences == 0 for level in found.values())
    e0, e1, e2, e3 = found.values()
    assert e0.counts["fetched records"] > 100
    assert e0.counts["rows fetched by the engine"] > 100
    assert e0.counts["positions compared with a prefill"] == e1.counts["tokens"] == 24 + 20 + 24
    assert e2.counts["tokens written"] == 24 + 20 + 24
    assert e2.counts["proposals accepted"] > 10
    assert e2.counts["proposals rejected"] > 0
    assert e3.counts["positions enumerated"] == 3 * 3
    assert is_idle(of.audited.engine)
    assert is_idle(of.resident.engine)


def test_tokens_without_a_verified_block_prove_nothing_of_a_draft():
    level = Level("E2")
    for mine, verdict in ((5, "untried"), (6, "REFUTED")):
        written = Written([[mine]], [[0]])
        compare_tokens(REQUESTS[:1], [[5]], written, level, "without a draft")
        count_proposals(written, level)
        assert level.verdict == verdict
    assert level.untried.startswith("no block was verified")


def test_a_small_vocabulary_is_counted_too():
    """Where no token is so rare that it is put together with others."""
    p = np.array([0.25, 0.75])
    fair, biased = (np.repeat([0, 1], counts) for counts in ((500, 1500), (900, 1100)))
    assert _chi_square(fair, p) == (0.0, 2)
    statistic, cells = _chi_square(biased, p)
    assert cells == 2
    assert statistic == pytest.approx(400**2 / 500 + 400**2 / 1500)
    assert _chi_square(fair, np.array([1.0, 0.0]))[0] > 1000  # what the model never says
    assert _chi_square(np.zeros(0, int), p)[1] < 2
