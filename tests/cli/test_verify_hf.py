"""`dhisparse verify-hf` on a fake engine: verdicts, and what it refuses."""

import json

import numpy as np
import pytest

from tests.cli.fake_engine import successor_logits

TOKENS = np.arange(10, dtype=np.int64)[None] + 60


@pytest.fixture
def folder(tmp_path):
    np.save(tmp_path / "inputs.npy", TOKENS)
    np.save(tmp_path / "logits.npy", successor_logits(TOKENS[0])[None])
    return tmp_path


def test_equal_logits_pass(run, fake, folder):
    result = run("verify-hf", folder)
    assert result.code == 0
    assert result.last_json == {
        "max_abs_diff": 0.0,
        "argmax_agreement": 1.0,
        "policy": "adaptive",
        "split": 5,
        "queries": 1,
        "tokens": 10,
        "fetched_rows": 2,
        "tolerance": 4e-5,
        "passed": True,
    }


def test_logits_may_come_without_the_batch(run, fake, folder):
    np.save(folder / "logits.npy", successor_logits(TOKENS[0]))
    assert run("verify-hf", folder, "--split", 10, "--policy", "fixed").last_json["split"] == 10


@pytest.mark.parametrize(("shift", "code"), [(3e-5, 0), (6e-5, 1)])
def test_tolerance_decides(run, fake, folder, shift, code):
    logits = successor_logits(TOKENS[0]).astype(np.float64)
    logits[3, 7] += shift
    np.save(folder / "logits.npy", logits)
    result = run("verify-hf", folder)
    assert result.code == code
    assert result.last_json["passed"] is (code == 0)
    assert result.last_json["max_abs_diff"] == pytest.approx(shift, rel=1e-3)
    assert run("verify-hf", folder, "--tolerance", 1e-3).code == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_fails(run, fake, folder, value):
    logits = successor_logits(TOKENS[0])
    logits[2, 2] = value
    np.save(folder / "logits.npy", logits)
    result = run("verify-hf", folder, "--tolerance", 1e9)
    assert result.code == 1
    assert result.last_json["max_abs_diff"] is None
    assert b"NaN" not in result.out


def test_agreement_is_a_share_of_positions(run, fake, folder):
    logits = successor_logits(TOKENS[0])
    logits[0, 0] = 99.0
    np.save(folder / "logits.npy", logits)
    assert run("verify-hf", folder).last_json["argmax_agreement"] == pytest.approx(0.9)


def save_pickled(path):
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)


def save_archive(path):
    with path.open("wb") as file:
        np.savez(file, a=TOKENS)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("inputs.npy", None, "no such file"),
        ("logits.npy", None, "no such file"),
        ("inputs.npy", b"junk", "is not a readable .npy file"),
        ("inputs.npy", save_pickled, "is not a readable .npy file"),
        ("inputs.npy", save_archive, "is an archive"),
        ("inputs.npy", TOKENS.astype(np.float32), "holds float32; token ids are integers"),
        ("inputs.npy", TOKENS[0], "has shape [10]; [1, S] with S >= 1 is needed"),
        ("inputs.npy", np.concatenate((TOKENS, TOKENS)), "has shape [2, 10]"),
        ("inputs.npy", TOKENS[:, :0], "has shape [1, 0]"),
        ("inputs.npy", TOKENS + 1000, "holds token 1069; ids go from 0 to 255"),
        ("inputs.npy", TOKENS - 100, "holds token -40"),
        ("logits.npy", np.zeros((1, 9, 256), np.float32), "has shape [9, 256]"),
        ("logits.npy", np.zeros((2, 10, 256), np.float32), "has shape [2, 10, 256]"),
        ("logits.npy", np.zeros((10, 256), np.int32), "holds int32; logits are floating-point"),
        ("logits.npy", np.zeros((10, 99), np.float32), "is over 99 tokens"),
    ],
)
def test_bad_files_are_refused(run, fake, folder, name, content, message):
    path = folder / name
    if content is None:
        path.unlink()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif callable(content):
        content(path)
    else:
        np.save(path, content)
    error = run("verify-hf", folder).error
    assert message in error
    assert name in error


def test_more_tokens_than_the_context_are_refused(run, fake, folder):
    tokens = np.full((1, 70), 65)
    np.save(folder / "inputs.npy", tokens)
    np.save(folder / "logits.npy", successor_logits(tokens[0]))
    assert "70 tokens, more than the context of 64" in run("verify-hf", folder).error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split", 11], "--split 11 is more than the 10 tokens"),
        (["--split", 0], "0 is not in the range 1 to"),
        (["--tolerance", "nan"], "nan is not a number of at least 0"),
    ],
)
def test_bad_options_are_refused(run, fake, folder, arguments, message):
    assert message in run("verify-hf", folder, *arguments).error


def test_a_missing_folder_is_refused(run, fake, tmp_path):
    assert "inputs.npy: no such file" in run("verify-hf", tmp_path / "none").error


def test_last_line_is_strict_json(run, fake, folder):
    json.loads(run("verify-hf", folder).out.splitlines()[-1], parse_constant=pytest.fail)
