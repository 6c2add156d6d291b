"""Several devices, and several processes: the same tokens as one, in virtual devices of a CPU."""

import json
import socket

import pytest

from dhisparse_jax.models.registry import load
from tests.support.checkpoints import PUBLISHED, quantised_tensors, write_published
from tests.support.mesh_runs import FIXTURES, LENGTHS, on_devices, requests, run, said, smallest
from tests.support.quantised import write_tensors

DISAGREE = (
    "processes disagree on number: process 0 has 0, process 1 has 1; give all of them the same"
)


@pytest.mark.slow  # two processes, below, are the cheaper representative
def test_a_checkpoint_over_two_devices_decodes_as_on_one(tmp_path):
    """Experts are spread over both, and requests, for which each has pools of its own."""
    write_published(tmp_path)
    lines = said(on_devices(2, f"published={tmp_path}", "refusals"))
    assert lines == [
        "done published",
        "mesh data=8,expert=1 needs 8 devices, there are 2: make it smaller; "
        "XLA_FLAGS=--xla_force_host_platform_device_count=8 makes virtual ones",
        "done refusals",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("drafted", ["", "drafted"])
@pytest.mark.parametrize("policy", ["resident", "fixed", "adaptive"])
def test_eight_devices_give_the_tokens_of_one(policy, drafted):
    assert said(on_devices(8, f"toy={policy},{drafted}")) == ["done toy"]


@pytest.mark.slow
def test_experts_that_do_not_divide():
    assert said(on_devices(3, "experts_over_three")) == [
        "mesh data=1,expert=3: 8 experts do not divide over 3 devices; use a length of axis expert "
        "that divides 8",
        "done experts_over_three",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["glm", "glm_sorted", "deepseek_v32", "deepseek_v4", "deepseek_v41"]
)
def test_published_models_over_four_devices(name):
    assert said(on_devices(4, name)) == [f"done {name}"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_quantised_experts_over_four_devices(tmp_path, kind):
    raw = PUBLISHED | {"hidden_size": 64, "moe_intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    write_tensors(tmp_path / "model.safetensors", quantised_tensors(raw, "fp8", kind)[0])
    assert said(on_devices(4, f"quantised={tmp_path}")) == ["done quantised"]


def pair(name):
    """What each of two processes said."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    start = lambda number: on_devices(1, name, MESH_ADDRESS=address, MESH_PROCESS=str(number))
    processes = [start(number) for number in range(2)]
    return [said(process) for process in processes]


def assert_both_say(found, name, wanted):
    """Gloo has a line of its own."""
    tokens = json.dumps({str(number): wanted[number] for number in sorted(wanted)})
    for lines in found:
        *_, line, done = lines
        assert DISAGREE in lines
        assert json.dumps(json.loads(line), sort_keys=True) == tokens
        assert done == f"done {name}"


def test_two_processes_give_the_tokens_of_one():
    """Before that they disagree, which each of them says in one line."""
    served, asked = smallest()
    assert_both_say(pair("toy_pair"), "toy_pair", run(served, asked, 1, "fixed")[0])


@pytest.mark.slow
def test_experts_over_two_processes_give_the_tokens_of_one():
    loaded = load(str(FIXTURES / "glm_tiny"))
    asked = requests(LENGTHS[:6], loaded.model.vocabulary)
    wanted, _ = run((loaded.model, loaded.params), asked, 4)
    assert_both_say(pair("glm_pair"), "glm_pair", wanted)
