"""`dhisparse doctor`: a whole document on this machine, and what it advises on others."""

import json

import pytest

from dhisparse_jax.cli import doctor, machine
from dhisparse_jax.cli.advice import CPU_MEANS, advice, meaning
from pallas_kernels.common.backends import GPU_KERNELS

GIB = 1 << 30


@pytest.fixture
def small(monkeypatch):
    """Sizes that take no time."""
    monkeypatch.setattr("dhisparse_jax.engine.rates.CPU_FLOORS", {"copy_bytes": 1 << 20, "side": 8})
    monkeypatch.setattr("dhisparse_jax.engine.rates.RECORD_WORDS", (32, 64))
    monkeypatch.setattr(doctor, "CPU_SPANS", (1 << 20, 2 << 20))
    monkeypatch.setattr(doctor, "CPU_CALL_BYTES", 1 << 16)
    monkeypatch.setattr(doctor, "RUNS", 2)


def test_a_whole_document(run, small, tmp_path):
    path = tmp_path / "doctor.json"
    result = run("doctor", "--json", path)
    assert result.code == 0
    document = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert document["complete"]
    assert {"python", "jax", "jaxlib", "flax", "driver"} <= document["versions"].keys()
    assert document["devices"][0]["memory_kinds"]
    assert document["rates"].keys() == {"hbm_gbps", "h2d_gbps", "bf16_tflops", "launch_us"}
    assert len(document["reads"]) == 2 * 2
    assert all(read["gbps"] > 0 for read in document["reads"])
    chosen = {(choice["format"], choice["operation"]) for choice in document["kernels"]}
    run_by_steps = GPU_KERNELS.keys() - {"packed_products", "round_rows"}
    assert chosen == {
        (kind, name) for kind in ("float32", "bfloat16", "fp8") for name in run_by_steps
    }
    assert all(choice["why"] for choice in document["kernels"])
    text = result.out.decode()
    assert "retrieve_attend" in text
    assert "no accelerator" in text


def test_what_was_found_is_kept_when_interrupted(run, small, tmp_path, monkeypatch):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "rates", stop)
    path = tmp_path / "doctor.json"
    assert run("doctor", "--json", path).code == 130
    document = json.loads(path.read_text())
    assert not document["complete"]
    assert document["kernels"]
    assert "reads" not in document


def test_large_spans_are_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr("dhisparse_jax.engine.memory.free_device_bytes", lambda: 256 << 20)
    fit, left = doctor.affordable_spans()
    assert fit == (16 << 20,)
    assert [span["span_bytes"] for span in left] == [128 << 20]
    assert "1/4 of the free memory" in left[0]["why"]


def test_a_json_that_cannot_be_written_is_refused_first(run, tmp_path):
    assert "there is no folder" in run("doctor", "--json", tmp_path / "a" / "b").error


def gpu(**changed):
    """A document of a machine with a GPU to which nothing is to be changed."""
    document = {
        "backend": "gpu",
        "versions": {"driver": "580"},
        "devices": [{"memory_limit_bytes": 90 * GIB}],
        "gpu_memory_bytes": 100 * GIB,
        "host": {
            "memory_bytes": 100 * GIB,
            "pinned_limit_bytes": 80 * GIB,
            "pinned_limit_variable": "LIMIT_GB",
            "pinned_limit_is_set": True,
        },
        "compilation_cache": "folder",
        "compilation_cache_error": None,
        "kernels": [
            {"operation": "top_k", "format": "fp8", "backend": "triton", "why": "it can"},
        ],
    }
    return {**document, **changed}


def host(**changed):
    return {"host": {**gpu()["host"], **changed}}


PLAIN = {"operation": "top_k", "format": "fp8", "backend": "reference", "why": "K is large"}


def test_nothing_to_change():
    assert advice(gpu()) == []


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"backend": "cpu"}, "pip install 'dhisparse-jax[cuda]'"),
        (host(pinned_limit_bytes=64 * GIB), "LIMIT_GB is 64 GiB of pinned memory"),
        (host(pinned_limit_bytes=64 * GIB), "export LIMIT_GB=80"),
        (
            host(pinned_limit_bytes=64 * GIB, pinned_limit_is_set=False),
            "is not set, which means 64",
        ),
        (host(pinned_limit_bytes=200 * GIB), "more than the 100 GiB of host memory"),
        ({"devices": [{"memory_limit_bytes": 75 * GIB}]}, "XLA_PYTHON_CLIENT_MEM_FRACTION=0.9"),
        ({"kernels": [PLAIN]}, "top_k (fp8): runs as plain jnp, slowly, since K is large"),
        ({"compilation_cache": None}, machine.CACHE_VARIABLE),
        (
            {"compilation_cache_error": "Read-only file system"},
            "is folder, where nothing can be kept (Read-only file system): set it to another",
        ),
    ],
)
def test_what_to_change(changed, wanted):
    (line,) = advice(gpu(**changed))
    assert wanted in line


def test_every_backend_has_a_meaning():
    assert meaning("cpu") == CPU_MEANS
    assert "pinned host memory" in meaning("gpu")
    assert "none of it has ever run on a TPU" in meaning("tpu")
    assert "no kernel that reads host memory" in meaning("metal")


def test_a_program_that_is_missing_says_nothing():
    assert machine.first_line("no-such-program-anywhere") == ""


def test_folders_in_which_nothing_can_be_kept(tmp_path):
    assert machine.unwritable(None) is machine.unwritable("gs://bucket/cache") is None
    assert machine.unwritable(str(tmp_path / "a" / "b")) is None
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").touch()
    assert machine.unwritable(str(tmp_path / "file")) == "File exists"
    assert machine.unwritable(str(tmp_path / "file" / "a")) == "Not a directory"
