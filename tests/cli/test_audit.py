"""`dhisparse audit`: what is printed and written, what is refused; the comparison is a fake."""

import json
from types import SimpleNamespace

import pytest

from dhisparse_jax.audit.findings import Difference
from dhisparse_jax.cli import audit as command
from dhisparse_jax.cli import session
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
    assert [line.split()[0] for line in result.err.splitlines()] == ["continuing", "E2:", "E0,"]


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


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["adaptive", "fixed"])
def test_a_small_model_without_a_draft_is_proved(run, prompt, monkeypatch, policy, tmp_path):
    """The whole command on a toy model, whose tokens are bytes modulo its vocabulary."""
    model, params = toy(layers_per_pool=(1, 2), context=128)
    tokenizer = SimpleNamespace(encode=lambda data: tuple(byte % 61 for byte in data))
    loaded = SimpleNamespace(
        name="toy",
        model=model,
        params=params,
        tokenizer=tokenizer,
        context=128,
        eos=(),
        mesh=None,
    )
    monkeypatch.setattr(session, "load_model", lambda *_, **__: loaded)
    texts = prompt("a.txt", b"a text that is longer than a selection"), prompt("b.txt", b"short")
    path = tmp_path / "audit.json"
    files = [word for text in texts for word in ("-p", text)]
    result = run("audit", "toy", *files, "-n", 12, "--policy", policy, "--json", path)
    assert result.code == 0, result.out.decode()
    document = json.loads(path.read_text())
    assert {level["verdict"] for level in document["levels"]} == {"proved"}
    assert document["levels"][0]["counts"]["fetched records"] > 0
    assert document["levels"][2]["counts"]["tokens"] == 24
