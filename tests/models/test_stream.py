"""Arrays out of pieces: every way to cut them, several devices, and a bound of host memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dhisparse_jax.models.stream import Piece, load_arrays
from tests.support.checkpoints import PUBLISHED

ROOT = Path(__file__).parents[2]
rng = np.random.default_rng(0)
TENSORS = {
    "wide": rng.normal(size=(24, 10)).astype(np.float32),
    "a": rng.normal(size=(6, 8)).astype(np.float32),
    "b": rng.normal(size=(6, 8)).astype(np.float32),
    "vector": rng.normal(size=37).astype(np.float32),
}
PIECES = {
    "same": (Piece("wide", (0, 0), (24, 10)),),
    "turned": (Piece("wide", (0, 0), (24, 10), transposed=True),),
    "heads": tuple(Piece("wide", (h, 0, 0), (5, 10), first=12 * h + 3) for h in range(2)),
    "pairs": tuple(
        Piece(name, (e, 0, 6 * side), (6, 8), transposed=True)
        for e in range(2)
        for side, name in enumerate("ab")
    ),
    "vector": (Piece("vector", (0,), (37,)),),
}
EXPECTED = {
    "same": TENSORS["wide"],
    "turned": TENSORS["wide"].T,
    "heads": TENSORS["wide"].reshape(2, 12, 10)[:, 3:8],
    "pairs": np.stack([np.concatenate((TENSORS["a"].T, TENSORS["b"].T), axis=1)] * 2),
    "vector": TENSORS["vector"],
}


@pytest.mark.parametrize("block_bytes", [1, 100, 1000, 1 << 20])
def test_pieces_give_the_array_whatever_the_size_of_a_block(block_bytes):
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in EXPECTED.items()}
    sizes = []

    def read(name, rows, stored):
        sizes.append(TENSORS[name][rows].nbytes)
        return TENSORS[name][rows]

    found = load_arrays(like, PIECES, read, block_bytes=block_bytes)
    for name, expected in EXPECTED.items():
        np.testing.assert_array_equal(found[name], expected)
    assert max(sizes) <= max(block_bytes, 40)  # a row at least


def test_pieces_that_do_not_cover_an_array_are_a_mistake():
    like = {"same": SimpleNamespace(shape=(25, 10), dtype=np.float32)}
    with pytest.raises(AssertionError, match="same"):
        load_arrays(like, PIECES, lambda name, rows, stored: TENSORS[name][rows])


SCRIPT = """
import json, sys
from pathlib import Path
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from dhisparse_jax.models.hf import load_hf
from dhisparse_jax.models.params import flatten, params_of
from tests.support.checkpoints import write_sparse

directory = Path(sys.argv[1])
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
def place(name, shape):
    return NamedSharding(mesh, P("x") if shape[0] % 4 == 0 else P())
raw = json.loads((directory / "config.json").read_text())
largest = write_sparse(directory, raw)
warm = load_hf(directory, place=place)  # compilation takes memory too, once
memory = lambda name: int(Path("/proc/self/status").read_text().split(name)[1].split()[0])
before = memory("VmRSS:")
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
loaded = load_hf(directory, place=place)
peak = memory("VmHWM:")
arrays = flatten(params_of(loaded.model))
print(json.dumps({
    "largest": largest,
    "result": sum(s.data.nbytes for x in arrays.values() for s in x.addressable_shards),
    "above": 1024 * (peak - before),
    "devices": len(arrays["layers.1.mlp.gate_up"].sharding.device_set),
    "shards": [list(s.data.shape) for s in arrays["layers.1.mlp.gate_up"].addressable_shards],
    "shape": list(arrays["layers.1.mlp.gate_up"].shape),
}))
"""
LARGE = {
    "vocab_size": 16384,
    "hidden_size": 512,
    "n_routed_experts": 128,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 2,
    "indexer_types": ["full", "shared"],
    "dtype": "bfloat16",
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_four_devices_are_filled_within_three_times_the_largest_tensor(tmp_path):
    """Two stacks of experts on the host, or one and its transpose, would take more."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | LARGE))
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    experts, *rest = measured["shape"]
    assert measured["shards"] == [[experts // 4, *rest]] * 4
    assert measured["devices"] == 4
    assert measured["above"] - measured["result"] < 3 * measured["largest"], measured
