"""Sessions on disk: continued elsewhere, kept through a kill, refused when they are not right."""

import dataclasses
import json
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.engine import store
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.events import NewTokens, PrefillProgress
from dhisparse_jax.engine.request import Request
from dhisparse_jax.engine.session import Session, fingerprint, imported
from dhisparse_jax.engine.store import load_session, save_session
from dhisparse_jax.errors import UserError
from dhisparse_jax.sampling import Sampling
from tests.support.host import host_rows
from tests.support.jobs import Heard, alone, drain
from tests.support.serving import CHUNK, POLICIES, config, drafted, engine, model, request
from tests.support.toy_draft import toy_draft


def small(produced=(5,)):
    """A session without an engine."""
    return Session(
        model="m",
        draft="d",
        request=Request(
            name="it", prompt=(1, 2, 3), max_new_tokens=9, sampling=Sampling(seed=3), stop=(4,)
        ),
        draw=2,
        produced=produced,
        records=(np.arange(96, dtype=np.int32).reshape(3, 32),),
        keys=(np.ones((3, 6), jax.dtypes.bfloat16),),
        ring=(np.zeros((1, 2), np.float32),),
        imported=False,
    )


def equal(one, other):
    plain = lambda session: dataclasses.replace(session, records=(), keys=(), ring=())
    arrays = lambda session: (*session.records, *session.keys, *session.ring)
    same = all(
        np.array_equal(a, b) and a.dtype == b.dtype
        for a, b in zip(arrays(one), arrays(other), strict=True)
    )
    return same and plain(one) == plain(other)


def test_load_gives_what_was_saved(tmp_path):
    save_session(tmp_path / "s", small())
    assert equal(load_session(tmp_path / "s"), small())
    save_session(tmp_path / "s", small((5, 6)))
    assert equal(load_session(tmp_path / "s"), small((5, 6)))
    assert len(list((tmp_path / "s").iterdir())) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_continues_from_disk_with_the_same_tokens(tmp_path, policy):
    """Saved under adaptive with a draft; the sampler goes on where it was."""
    asked = request(20, 30, seed=1)
    expected = alone(asked)
    served, heard = drafted(*POLICIES["adaptive"], toy_draft([[*asked.prompt, *expected]])), Heard()
    number = served.submit(asked)
    for _ in range(3):
        for event in served.advance():
            heard.add(event)
    save_session(tmp_path, served.save(number))
    session = load_session(tmp_path)
    assert 2 < len(session.produced) < 30
    other = engine(*POLICIES[policy])
    resumed = other.resume(session)
    assert [*session.produced, *drain(other).tokens[resumed]] == expected
    again = served.resume(session)  # with the ring
    assert [*session.produced, *drain(served, heard).tokens[again]] == expected
    assert heard.tokens[number] == expected


def test_other_weights_are_another_model():
    served, other = engine(*POLICIES["fixed"]), model()[0]
    number = served.submit(request(20, 5, seed=1))
    list(served.advance())
    session = served.save(number)
    drain(served)
    stranger = Engine(other, other.init(1), config(*POLICIES["fixed"]), chunk=CHUNK)
    with pytest.raises(UserError, match=r"20\+5: the session is of model .* load its model"):
        stranger.resume(session)


def taken(asked):
    """KV of a prompt but its last token, from an engine's host pools by hand."""
    source = engine("resident", 1)
    number = source.submit(dataclasses.replace(asked, prompt=asked.prompt[:-1]))
    list(source.advance())
    row = next(n for n, job in enumerate(source._roster.rows) if job is not None)
    state, size = jax.device_get(source.state), len(asked.prompt) - 1
    rows = host_rows(source.cfg, state)[row, :size]
    source.cancel(number)
    drain(source)
    records = [pool.host[rows] for pool in state.pools]
    return records, [pool.index_keys[row, :size] for pool in state.pools]


def test_imported_history_is_continued():
    asked = request(20, 12, seed=1)
    session = imported(engine("resident", 1).model_id, asked, *taken(asked))
    for served in (engine(*POLICIES["fixed"]), drafted("fixed", 4, toy_draft())):
        resumed = served.resume(session)
        assert drain(served).tokens[resumed] == alone(asked)


def test_imported_history_is_nobody_elses(tmp_path):
    """KV of another text under the tokens of this one, also when it is saved and comes back."""
    asked = request(20, 12, seed=1)
    served = engine(*POLICIES["fixed"])
    session = imported(served.model_id, asked, *taken(request(20, 12, seed=2)))
    for _ in range(2):
        number, heard = served.resume(session), Heard()
        for _ in range(3):
            for event in served.advance():
                heard.add(event)
        save_session(tmp_path, served.save(number))
        drain(served, heard)
        assert heard.tokens[number] != alone(asked)[-len(heard.tokens[number]) :]
        session = load_session(tmp_path)
        number = served.submit(asked)
        assert drain(served).tokens[number] == alone(asked)
        served.sharing.forget()


def test_a_session_of_the_model_is_shared():
    """19 of 20 tokens of the prompt are there: one chunk in place of two, in both pools."""
    asked = request(20, 12, seed=1)
    served, other = engine(*POLICIES["fixed"]), engine(*POLICIES["adaptive"])
    number = served.submit(asked)
    list(served.advance())
    session = served.save(number)
    drain(served)
    other.resume(session)
    drain(other)
    number, events = other.submit(asked), []
    while not other.idle:
        events.extend(other.advance())
    assert {event.total for event in events if isinstance(event, PrefillProgress)} == {2}
    found = [event.tokens for event in events if isinstance(event, NewTokens)]
    assert [token for tokens in found for token in tokens] == alone(asked)


@pytest.mark.parametrize(("part", "kind"), [("records", np.float32), ("keys", np.float64)])
def test_imported_history_has_the_dtypes_of_the_model(part, kind):
    """Numbers in place of words are as wide as words, and were read as words: 0.5 as 0."""
    asked, served = request(20, 12, seed=1), engine(*POLICIES["fixed"])
    session = imported(served.model_id, asked, *taken(asked))
    wrong = tuple(array.astype(kind) for array in getattr(session, part))
    object.__setattr__(session, part, wrong)  # types are checked at run time in tests alone
    with pytest.raises(UserError, match=rf"pool 0 are .*{np.dtype(kind)}.*; needed are int32\["):
        served.resume(session)


class Whole(np.ndarray):
    """An array that is nowhere flattened, as there may be no room for another one like it."""

    def reshape(self, *_):
        raise AssertionError("copied")

    flatten = ravel = reshape


def test_a_model_is_named_without_a_copy_of_any_weight():
    """The name is that of 64 numbers, evenly spread, of each weight as one row of numbers."""
    shapes = {"scalar": (), "few": (5,), "none": (0, 3), "all": (8, 8), "some": (3, 50, 7)}
    weights = {
        name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        for name, shape in shapes.items()
    }
    weights["fp8"] = np.linspace(0, 9, 400).astype(jnp.float8_e4m3fn).reshape(4, 100)
    name = fingerprint("sizes", jax.tree.map(lambda leaf: leaf.view(Whole), weights))
    assert name == fingerprint("sizes", jax.tree.map(jnp.asarray, weights))
    assert name == "5296d4c1a2f6cab6ec5dfe2f10c6d1d3"
    weights["some"][2, 0, 5] += 1  # number 705 of 1050, every 16th counts
    assert name == fingerprint("sizes", weights)
    weights["some"][2, 0, 4] += 1
    assert name != fingerprint("sizes", weights)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.engine.test_store import small
from dhisparse_jax.engine import store
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "writing":
    store._head = die
else:
    Path.rename = die
store.save_session(Path(sys.argv[1]), small((5, 6, 7)))
"""


@pytest.mark.parametrize("when", ["writing", "renaming"])
def test_kill_leaves_the_old_save_intact(tmp_path, when):
    save_session(tmp_path, small())
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), when], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == [".2.part", "1"]
    assert equal(load_session(tmp_path), small())
    save_session(tmp_path, small((8,)))
    assert equal(load_session(tmp_path), small((8,)))
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), ValueError("x: No space left on device")]
)
def test_full_disk(tmp_path, monkeypatch, error):
    save_session(tmp_path, small())

    def fail(path, arrays):
        path.mkdir()
        raise error

    monkeypatch.setattr(store, "save_arrays", fail)
    with pytest.raises(UserError, match=r"does not fit on the disk .* 428 bytes, \d+ are free"):
        save_session(tmp_path, small((6,)))
    assert equal(load_session(tmp_path), small())
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_refused(tmp_path):
    with pytest.raises(UserError, match="holds no session"):
        load_session(tmp_path / "nothing")
    save_session(tmp_path, small())
    head = tmp_path / "1" / "session.json"
    head.write_text(json.dumps(json.loads(head.read_text()) | {"format": 0}))
    with pytest.raises(UserError, match="of format 0, this is 2"):
        load_session(tmp_path)
    head.write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        load_session(tmp_path)
