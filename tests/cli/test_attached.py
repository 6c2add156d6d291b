"""The command on a checkpoint that has a draft attached, on the real engine."""

import json

import pytest

from tests.support.small_v41 import FIXTURE

TEXTS = ("tree stone river light water night house road", "sea wind")
UNUSED = "tensors are of parts of the model that are not used\n"


@pytest.fixture
def decoded(run, prompt, tmp_path):
    def decode(model, *arguments):
        paths = [("-p", prompt(f"p{n}", text.encode())) for n, text in enumerate(TEXTS)]
        document = tmp_path / "out.json"
        options = ("-n", 12, "--json", document, *arguments)
        result = run("decode", "-m", model, *[item for pair in paths for item in pair], *options)
        assert result.code == 0, result.err
        return json.loads(document.read_text()), result.err

    return decode


@pytest.mark.slow
def test_the_draft_of_a_checkpoint_is_used_by_default_and_changes_no_token(run, decoded, tmp_path):
    plain, said = decoded(FIXTURE, "--draft", "none")
    assert said.startswith(f"{FIXTURE}: 75 {UNUSED}")  # its draft, and what is for images
    drafted, said = decoded(FIXTURE, "--policy", "fixed", "--hot-rows", 6)
    assert said.startswith(f"{FIXTURE}: 3 {UNUSED}")
    assert run("convert", FIXTURE, tmp_path / "own").last_json["unused_tensors"] == [
        "image_start",
        "layers.0.ffn.gate.bias_vl",
        "mtp.0.ffn.gate.bias_vl",
    ]
    scheduled, said = decoded(tmp_path / "own", "--draft-length", "auto")
    assert UNUSED not in said
    assert [run["draft"] for run in (plain, drafted, scheduled)] == ["none", "dspark", "dspark"]
    assert plain["requests"] == drafted["requests"] == scheduled["requests"]
    assert drafted["metrics"]["draft_bytes"] > 0


@pytest.mark.slow
def test_what_does_not_fit_is_one_line(run, prompt, tmp_path):
    for path in FIXTURE.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    raw = json.loads((FIXTURE / "config.json").read_text())
    raw["text_config"]["dspark_target_layer_ids"] = [3, 6]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    result = run("decode", "-m", tmp_path, "-p", prompt("a", b"tree"))
    assert (result.code, result.out) == (2, b"")
    said, error = result.err.splitlines()
    assert UNUSED.strip() in said
    assert (
        "config.json: the draft reads layer 6 of the target, but the target has 6 layers" in error
    )
