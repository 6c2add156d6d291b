"""`dhisparse plan`: what it prints, what it writes, and what it refuses."""

import json

import pytest

from dhisparse_jax.config import Policy

SMALL = ("plan", "--model", "tiny", "--gpus", 2, "--context", 4096, "--concurrency", 8)


def test_a_plan_is_printed_and_written(run, tmp_path):
    path = tmp_path / "plan.json"
    result = run(*SMALL, "--draft", "dflash2", "--json", path)
    assert result.code == 0, result.err
    found = json.loads(path.read_text())
    assert list(found["policies"]) == [policy.value for policy in Policy]
    assert found["requests_per_gpu"] == 4
    text = result.out.decode()
    for each in found["policies"].values():
        assert each["device_bytes"] == pytest.approx(sum(each["bytes"].values()))
        hidden = each["stages_ms"]["retrieve"] - each["exposed_ms"]
        assert each["step_ms"] == pytest.approx(sum(each["stages_ms"].values()) - hidden)
        speed = each["requests"] * each["tokens_per_step"] / each["step_ms"]
        assert each["tokens_per_s"] == pytest.approx(1e3 * speed)
        assert each["step_ms"] >= each["floor_ms"]
        assert f"{each['tokens_per_s']:.0f}" in text
    assert "GB of device memory" in text
    assert "tokens/s per GPU" in text


def test_a_plan_on_standard_output_is_alone_there(run):
    result = run(*SMALL, "--json", "-")
    assert list(json.loads(result.out)["policies"]) == [policy.value for policy in Policy]
    assert "GB of device memory" in result.err


def test_a_policy_that_does_not_fit_has_no_speed(run, tmp_path):
    path = tmp_path / "plan.json"
    result = run("plan", "--context", 1_000_000, "--concurrency", 16, "--json", path)
    assert result.code == 0, result.err
    resident = json.loads(path.read_text())["policies"]["resident"]
    assert resident["requests"] == 0
    assert resident["waiting"] == 2
    assert resident["tokens_per_s"] is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--model", "gpt"], "--model gpt has no known sizes; use one of glm-5.3, tiny"),
        (["--gpu", "b200"], "--gpu b200 has no known sizes; use one of h200"),
        (["--gpus", 7], "256 experts cannot be spread evenly over 7 GPUs; use a divisor of 256"),
        (["--gpus", 0], "0 is not in the range 1 to"),
        (["--context", 100], "a context of 100 positions is not in the model's range 2048 to"),
        (["--draft", "eagle"], "there are no sizes of a draft 'eagle'; use one of none, dflash2"),
        (["--accept-length", 2], "--accept-length is of a draft: name one with --draft"),
        (["--accept-length", "nan"], "is not a number above 0"),
        (["--gpus", 1], "GB of device memory on each of 1 GPUs with 141.8 GB; use more --gpus"),
    ],
)
def test_bad_input_is_one_line(run, arguments, error):
    assert error in run("plan", *arguments).error


def test_a_file_that_cannot_be_written_is_refused_first(run, tmp_path):
    assert "there is no folder" in run(*SMALL, "--json", tmp_path / "none" / "x.json").error
