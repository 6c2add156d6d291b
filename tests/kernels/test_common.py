"""Row packing, ids and memory spaces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.hierarchy.state import HOST_KIND, host_sharding
from pallas_kernels.common.backends import (
    decisions,
    default_backend,
    resolve,
    target,
    targeting,
)
from pallas_kernels.common.ids import NO_SLOT, dropping, masked
from pallas_kernels.common.memory_space import as_device, as_host, is_host
from pallas_kernels.common.rows import gather_words, pack, unpack, words_of

DTYPES = ["float32", "bfloat16", "float8_e4m3fn"]


def values(dtype, *shape):
    return np.random.default_rng(0).normal(size=shape).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_keeps_the_bytes_in_order(dtype):
    numbers = values(dtype, 3, 5, 8)
    words = np.asarray(pack(jnp.asarray(numbers)))
    assert words.shape == (3, 5, words_of(8, dtype))
    assert words.tobytes() == numbers.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_unpack_is_the_inverse(dtype):
    numbers = values(dtype, 3, 8)
    back = np.asarray(unpack(pack(jnp.asarray(numbers)), dtype))
    assert back.dtype == numbers.dtype
    assert back.tobytes() == numbers.tobytes()


def test_rows_fill_whole_words():
    assert words_of(576, "bfloat16") == 288
    assert words_of(576, jnp.float32) == 576
    with pytest.raises(ValueError, match="3 x bfloat16 is 6 bytes"):
        words_of(3, "bfloat16")


def test_gather_words():
    table = np.arange(40, dtype=np.int32).reshape(5, 8)
    rows = np.array([[4, 0], [2, 2]], np.int32)
    found = jax.jit(lambda t, r: gather_words(t, r, 3, 4))(table, rows)
    np.testing.assert_array_equal(found, table[rows][..., 3:7])


def test_dropped_ids_write_nothing():
    ids = dropping(jnp.asarray([2, NO_SLOT, 0], jnp.int32), 4)
    written = jnp.zeros(4, jnp.int32).at[ids].set(jnp.asarray([7, 8, 9], jnp.int32), mode="drop")
    assert written.tolist() == [9, 0, 7, 0]


def test_masked():
    ids = jnp.asarray([5, 6, NO_SLOT], jnp.int32)
    assert masked(ids, jnp.asarray([True, False, True])).tolist() == [5, NO_SLOT, NO_SLOT]


def test_memory_spaces_change_the_type_and_no_byte():
    host = jax.device_put(jnp.arange(6, dtype=jnp.int32), host_sharding())
    assert host.sharding.memory_kind == HOST_KIND and is_host(host)

    def double(array):
        assert is_host(array)
        inside = as_device(array)
        assert not is_host(inside)
        assert as_device(inside) is inside
        result = as_host(inside * 2)
        assert is_host(result)
        return result, inside + 1

    result, device = jax.jit(double)(host)
    assert result.sharding.memory_kind == HOST_KIND
    assert device.sharding.memory_kind != HOST_KIND
    assert result.tolist() == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize(
    ("operation", "platform", "backend"),
    [
        ("sparse_attention", "cuda", "mosaic"),
        ("index_scores", "gpu", "mosaic"),
        ("retrieve", "gpu", "triton"),
        ("plan", "gpu", "triton"),
        ("sparse_attention", "cpu", "reference"),
        ("plan", "tpu", "reference"),
        ("retrieve_attend", "tpu", "reference"),
        ("retrieve", "tpu", "tpu"),
        ("retrieve", "cpu", "reference"),
    ],
)
def test_default_backend(operation, platform, backend):
    assert default_backend(operation, platform) == backend


def test_host_operations_need_a_kernel():
    with pytest.raises(NotImplementedError, match="retrieve has no kernel for metal; run on cpu"):
        default_backend("retrieve", "metal")


def test_programs_for_a_tpu_choose_its_kernels_and_say_why():
    with targeting("tpu"), decisions() as found:
        assert resolve("backup", None, refusal="not for a GPU") == "tpu"
        assert resolve("plan", None, refusal=None) == "reference"
        with pytest.raises(NotImplementedError, match="retrieve cannot run this: odd records"):
            resolve("retrieve", None, refusal=None, tpu_refusal="odd records")
    assert [decision.why for decision in found] == [
        "the TPU kernel for operands like these",
        "XLA's gathers and sorts of small tables serve on a TPU",
    ]
    with pytest.raises(NotImplementedError, match="plan has no tpu kernel"):
        resolve("plan", "tpu", refusal=None)


def test_what_is_traced_for_one_target_is_not_taken_for_another():
    targets = []
    traced = jax.jit(lambda: targets.append(target().platform) or jnp.int32(0))
    for platform in ("tpu", "cpu", "tpu"):
        with targeting(platform):
            traced()
    assert targets == ["tpu", "cpu"]


def test_only_a_default_gives_way_to_the_reference(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert resolve("top_k", None, refusal=None) == "triton"
    assert resolve("top_k", None, refusal="65 heads") == "reference"
    assert resolve("top_k", "reference", refusal="65 heads") == "reference"
    with pytest.raises(NotImplementedError, match="top_k cannot run this: 65 heads"):
        resolve("top_k", "triton", refusal="65 heads")
    with pytest.raises(NotImplementedError, match="retrieve cannot run this: odd records"):
        resolve("retrieve", None, refusal="odd records")


def test_operands_may_have_a_kernel_of_their_own(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    named = {"refusal": None, "kernel": "triton"}
    assert resolve("index_scores", None, **named) == "triton"
    assert resolve("index_scores", "triton", **named) == "triton"
    assert resolve("index_scores", "reference", **named) == "reference"
    with pytest.raises(NotImplementedError, match="no mosaic kernel for operands like these"):
        resolve("index_scores", "mosaic", **named)
    with pytest.raises(NotImplementedError, match="top_k has no mosaic kernel"):
        resolve("top_k", "mosaic", refusal=None)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert resolve("index_scores", None, **named) == "reference"


def test_decisions_say_which_implementation_and_why():
    with decisions() as found:
        resolve("top_k", None, refusal=None)
        resolve("retrieve", "reference", refusal=None)
    assert [tuple(decision) for decision in found] == [
        ("top_k", "reference", "there is no kernel for this device"),
        ("retrieve", "reference", "named by the caller"),
    ]


def test_decisions_name_what_the_kernel_refuses(monkeypatch):
    monkeypatch.setattr("pallas_kernels.common.backends.default_backend", lambda _: "triton")
    with decisions() as found:
        resolve("top_k", None, refusal="K is large")
        resolve("top_k", None, refusal=None)
    assert found[0].backend == "reference"
    assert found[0].why == "the triton kernel cannot run this: K is large"
    assert found[1].backend == "triton"
