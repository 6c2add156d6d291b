"""TPU kernels at production sizes: lowered everywhere, compiled where libtpu is installed."""

import importlib.util
import json

import jax
import pytest
import typer

from bench import tpu_aot
from bench.tpu_cases import CASES, HostPool
from bench.tpu_step import TOPOLOGIES
from pallas_kernels.common.interpret import ahead_of_time

COMPILER = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
LOWERED = [
    *(("index_scores", name) for name in ("16_requests_T8", "16_requests_T1_fp8")),
    ("top_k", "2048_of_100000"),
    *(("sparse_attention", name) for name in ("128_requests_T8", "128_requests_T1_fp8")),
]


@pytest.mark.parametrize("generation", TOPOLOGIES.values())
@pytest.mark.parametrize(("operation", "name"), LOWERED)
def test_lowers_for_a_tpu_in_one_kernel_and_without_a_copy(operation, name, generation):
    case = CASES[operation][name]
    with ahead_of_time(generation):
        traced = jax.jit(case.function).trace(*case.operands)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("custom_call @tpu_custom_call") == 1
    largest = max(jax.tree.leaves(case.operands), key=lambda leaf: leaf.size)
    made = f"-> tensor<{largest.shape[0]}x{largest.shape[1]}x{largest.shape[2]}x"
    assert not [line for line in text.splitlines() if made in line and "call" not in line]


def test_the_model_counts_what_a_case_moves():
    """Sizes by hand: 100,000 keys of 256 B for 16 requests; 2,048 rows of three lines each."""
    keys = CASES["index_scores"]["16_requests_T1"].traffic.hbm_bytes
    assert keys == 16 * (100_000 * (256 + 4) + 32 * 256)
    case = CASES["sparse_attention"]["16_requests_T1"]
    assert case.copies == 16 * 2048
    assert case.traffic.hbm_bytes >= case.copies * 3 * 512
    case = CASES["backup"]["2688B_512"]
    assert case.traffic.link_bytes == 6 * 512 * 4096
    assert all(isinstance(pool, HostPool) for pool in case.operands[0])


def test_unknown_names_are_refused():
    with pytest.raises(typer.BadParameter, match="v4:2x2 is none of v5e:2x2, v6e:2x2"):
        tpu_aot.main(topology="v4:2x2")
    with pytest.raises(typer.BadParameter, match="matmul is none of retrieve"):
        tpu_aot.main(topology="v5e:2x2", op="matmul")
    with pytest.raises(typer.BadParameter, match="3 chips do not divide the 64 of num_heads"):
        tpu_aot.main(topology="v5e:2x2", model="glm-5.3", heads_over=3)


@COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_operation_compiles(topology, tmp_path, capsys):
    """One case of each; pools are updated in place, or the row says that they are not."""
    out = tmp_path / "aot.json"
    for operation, case in (
        ("retrieve", "2688B_512$"),
        ("backup", "2688B_512$"),
        ("index_scores", "T1_fp8"),
        ("top_k", "2048_of"),
        ("sparse_attention", "16_requests"),
    ):
        tpu_aot.main(topology=topology, op=operation, case=case, json=out)
        (row,) = json.loads(out.read_text())["rows"]
        assert row["time_us"] is None
        assert row["floor_us"] > 0
        assert "reason" not in row["detail"]
        assert row["detail"]["memory"]["host_temporary_bytes"] == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["bench"] == "tpu_aot"


@COMPILER
def test_a_share_that_does_not_fit_is_refused_before_anything_is_compiled(tmp_path):
    """With whole attention on a v5e: weights alone are more than its 15.75 GiB."""
    out = tmp_path / "aot.json"
    with pytest.raises(typer.Exit):
        tpu_aot.main(topology="v5e:2x2", model="glm-5.3", heads_over=1, json=out)
    (row,) = json.loads(out.read_text())["rows"]
    assert "RESOURCE_EXHAUSTED" in row["detail"]["reason"]
    assert row["detail"]["sizes"]["heads"] == 64
    assert "programs" not in row["detail"]


@COMPILER
def test_a_kernel_compiles(tmp_path):
    out = tmp_path / "aot.json"
    tpu_aot.main(topology="v5e:2x2", op="index_scores", case="T1$", json=out)
    document = json.loads(out.read_text())
    assert document["device"].startswith("v5e:2x2, described")
    (row,) = document["rows"]
    assert row["detail"]["memory"]["temporary_bytes"] == 0
    assert row["bound"] == "hbm"
