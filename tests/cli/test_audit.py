"""`dhisparse audit`: what is printed and written, what is refused; the comparison is a fake."""

import json
from types import SimpleNamespace

import pytest

from dhisparse_jax.audit import levels
from dhisparse_jax.audit.findings import Difference
from dhisparse_jax.audit.lockstep import Text
from dhisparse_jax.cli import audit as command
from dhisparse_jax.cli import options as opt
from dhisparse_jax.cli import session
from dhisparse_jax.cli.format_options import FormatOptions
from dhisparse_jax.engine.request import Request
from dhisparse_jax.hierarchy import group
from tests.cli.conftest import Fake
from tests.support.toy_model import toy

FOUND = Difference("a host record differs", "a.txt", 2, 3, 17, "1 of 32 words")


@pytest.fixture
def compared(fake: Fake, monkeypatch):
    """The levels as a fake comparison leaves them; set `ends` to say how it ends."""
    told = SimpleNamespace(ends=lambda levels: None, options=None)

    def subjects_of(options, loaded, requests, check):
        told.options, told.requests = options, requests
        return None, []

    def compare(subjects, requests, texts, levels, check):
        for level in levels:
            level.counts["tokens"] += 5
        levels.e0.counts["fetched records"] += 7
        levels.e3.figures["largest error"] = 1.5e-8
        told.ends(levels)

    monkeypatch.setattr(command, "subjects_of", subjects_of)
    monkeypatch.setattr("dhisparse_jax.audit.levels.audit", compare)
    return told


def test_every_level_is_reported(run, compared, prompt, tmp_path):
    path = tmp_path / "audit.json"
    result = run("audit", "-p", prompt("a.txt", b"text"), "-n", 3, "--json", path)
    assert result.code == 0
    text = result.out.decode()
    for name in ("E0", "E1", "E2", "E3"):
        assert f"{name} proved: " in text
    assert "5 tokens; 7 fetched records" in text
    assert "largest error 1.5e-08" in text
    document = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert document["complete"]
    assert [level["level"] for level in document["levels"]] == ["E0", "E1", "E2", "E3"]
    assert document["levels"][0]["counts"] == {"tokens": 5, "fetched records": 7}
    assert [request.max_new_tokens for request in compared.requests] == [3]


def test_progress_goes_to_standard_error(run, compared, prompt, monkeypatch):
    def subjects_of(options, loaded, requests, check):
        check()
        return None, [check]

    def compare(subjects, requests, texts, levels, check):
        for counts, name in (
            (levels.e0.counts, "steps of the engine"),
            (levels.e1.counts, "tokens"),
        ):
            counts[name] += 1
            check()
            check()

    monkeypatch.setattr(command, "subjects_of", subjects_of)
    monkeypatch.setattr("dhisparse_jax.audit.levels.audit", compare)
    result = run("audit", "-p", prompt("a.txt", b"text"))
    assert [line.split()[0] for line in result.err.splitlines()] == ["continuing", "E0,", "E0,"]


def test_what_is_refuted_is_named_and_fails(run, compared, prompt, tmp_path):
    compared.ends = lambda levels: levels.e0.add([FOUND])
    path = tmp_path / "audit.json"
    result = run("audit", "-p", prompt("a.txt", b"text"), "--json", path)
    assert result.code == 1
    line = "first of 1: request a.txt, step 2, layer 3, position 17: a host record differs"
    assert line in result.out.decode()
    level = json.loads(path.read_text())["levels"][0]
    assert level["verdict"] == "REFUTED"
    assert level["first"]["position"] == 17


def test_what_was_found_is_kept_when_interrupted(run, compared, prompt, tmp_path):
    def stop(levels):
        raise KeyboardInterrupt

    compared.ends = stop
    path = tmp_path / "audit.json"
    result = run("audit", "-p", prompt("a.txt", b"text"), "--json", path)
    assert result.code == 130
    assert not json.loads(path.read_text())["complete"]
    assert b"not finished" in result.out


def test_what_was_not_tried_says_why(run, compared, prompt):
    def untried(levels):
        levels.e2.untried = "promised for a history in float32"
        levels.e0.counts["fetched records"] = 0

    compared.ends = untried
    result = run("audit", "-p", prompt("a.txt", b"text"))
    assert result.code == 0
    assert b"E2 untried" in result.out
    assert b"promised for a history in float32" in result.out
    assert b"nothing was fetched: lower --hot-rows" in result.out


def test_the_bundled_model_has_its_draft_and_others_none(run, compared, prompt):
    text = prompt("a.txt", b"text")
    run("audit", "-p", text)
    assert compared.options.draft.name == "dflash2"
    run("audit", "elsewhere", "-p", text, "--draft-length", 2)
    assert (compared.options.model, compared.options.draft.name) == ("elsewhere", "none")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draft-length", "auto"], "--draft-length"),
        (["--hot-rows", 0], "0 is not in the range 1 to"),
        (["-p", "missing"], "missing: no such file"),
    ],
)
def test_bad_options_are_refused(run, compared, arguments, message):
    assert message in run("audit", *arguments).error


def test_a_text_that_does_not_fit_is_refused(run, fake, prompt):
    error = run("audit", "-p", prompt("a.txt", b"x" * 40), "-n", 22).error
    assert "take 65 positions; tiny has a context of 64" in error


@pytest.fixture
def toy_loaded(monkeypatch):
    """A toy model, whose tokens are bytes modulo its vocabulary."""
    model, params = toy(layers_per_pool=(1, 2), context=128)
    loaded = SimpleNamespace(
        name="toy",
        model=model,
        params=params,
        tokenizer=SimpleNamespace(encode=lambda data: tuple(byte % 61 for byte in data)),
        context=128,
        eos=(),
        mesh=None,
    )
    monkeypatch.setattr(session, "load_model", lambda *_, **__: loaded)
    return loaded


def test_without_a_draft_the_program_without_one_is_audited(toy_loaded, monkeypatch):
    """One query; the draft that knows the texts is of another engine, which E0 and E1 leave out."""
    text = Text("a.txt", (1, 2, 3, 4), 3)
    monkeypatch.setattr(levels, "written_texts", lambda *_: [text])
    options = command.AuditOptions(
        model="toy",
        dtype=opt.DtypeName.FLOAT32,
        formats=FormatOptions(None, None),
        prompt_files=(),
        new_tokens=1,
        hierarchy=opt.HierarchyOptions(opt.PolicyName.FIXED, None, None, dispatch_steps=1),
        draft=opt.DraftOptions(),
    )
    asked = Request(name="a.txt", prompt=(1, 2, 3), max_new_tokens=1)
    subjects, _ = command.subjects_of(options, toy_loaded, [asked], lambda: None)
    audited = subjects.audited.engine
    assert (audited.cfg.queries, audited.drafter.length) == (1, 0)
    assert subjects.resident.engine is subjects.plain
    assert audited.cfg.policy == subjects.drafted.cfg.policy == "fixed"
    assert (subjects.drafted.cfg.queries, subjects.drafted.drafter.length) == (4, 3)


def audit_toy(run, prompt, policy, path):
    texts = prompt("a.txt", b"a text that is longer than a selection"), prompt("b.txt", b"short")
    files = [word for text in texts for word in ("-p", text)]
    result = run("audit", "toy", *files, "-n", 12, "--policy", policy, "--json", path)
    return result, json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.usefixtures("toy_loaded")
def test_a_fault_of_one_query_is_found_without_a_draft(run, prompt, monkeypatch, tmp_path):
    """Attention that runs together with the retrieval is a little off, for one query alone."""
    right = group.retrieve_attend

    def wrong(state, cfg, pool, layer, plan, selection, query):
        attended, state = right(state, cfg, pool, layer, plan, selection, query)
        off = 1e-6 * (query.shape[1] == 1 and cfg.policy == "fixed")
        return attended._replace(values=attended.values * (1.0 + off)), state

    monkeypatch.setattr(group, "retrieve_attend", wrong)
    result, document = audit_toy(run, prompt, "fixed", tmp_path / "audit.json")
    assert result.code == 1
    assert document["levels"][1]["verdict"] == "REFUTED"
    assert document["levels"][1]["first"]["layer"] == 0


@pytest.mark.slow
@pytest.mark.usefixtures("toy_loaded")
@pytest.mark.parametrize("policy", ["adaptive", "fixed"])
def test_a_small_model_without_a_draft_is_proved(run, prompt, policy, tmp_path):
    """The whole command."""
    result, document = audit_toy(run, prompt, policy, tmp_path / "audit.json")
    assert result.code == 0, result.out.decode()
    assert b"E2 and E3 with a draft of 3 tokens" in result.out
    assert document["rehearsed"] == 3
    assert {level["verdict"] for level in document["levels"]} == {"proved"}
    assert document["levels"][0]["counts"]["fetched records"] > 0
    written = [level["counts"].get("tokens written") for level in document["levels"]]
    assert written == [None, 24, 24, None]
    assert document["levels"][2]["counts"]["proposals accepted"] > 0
