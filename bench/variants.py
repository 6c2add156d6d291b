"""Variants of the kernels that have a choice, for `bench.tune`.

A variant is an operation with a tuning, at a production size, and a small problem to check it on.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from bench.ops import index_scores, sparse_attention
from bench.ops.index_scores import IndexScores
from bench.ops.sparse_attention import SparseAttention
from pallas_kernels.common.rows import unpack
from pallas_kernels.index_scores import cases as index_cases
from pallas_kernels.index_scores import mosaic as index_mosaic
from pallas_kernels.index_scores import reference as index_reference
from pallas_kernels.index_scores import triton as index_triton
from pallas_kernels.index_scores.types import Keys, ScaledKeys, quantise
from pallas_kernels.sparse_attention import cases as sparse_cases
from pallas_kernels.sparse_attention import reference as sparse_reference
from pallas_kernels.sparse_attention import triton as sparse_triton

Tree = Any
"""A pytree of arrays."""

Operation = Callable[..., Tree]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A kernel with a tuning.

    Attributes:
        case: production size.
        label: what distinguishes the variant.
        call: the operation with its tuning, on the arrays of a call.
        exact: the reference on the same arrays, in float32.
        step: `step` of the operation's module.
        small: arrays of a small problem, with masked entries and poison.
        small_options: what the operation is told beside them.
        options: the same at production size.
        prepare: turns operands, or the arrays of a call, into what the variant wants.
    """

    case: SparseAttention | IndexScores
    label: str
    call: Operation
    exact: Operation
    step: Callable[[Operation], Callable[..., Tree]]
    small: tuple[Array, ...]
    small_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    prepare: Callable[[Tree], Tree] = lambda operands: operands


def attention(*, small: bool) -> Iterator[Variant]:
    """Of sparse attention: at 128 requests the pipeline, at 16 the parts of a selection."""
    tuning = sparse_triton.Tuning
    one, eight, few = SparseAttention(), SparseAttention(queries=8), SparseAttention(requests=16)
    for case, variant in [
        (one, tuning()),
        (one, tuning(warps=4)),
        (one, tuning(block=32, stages=4)),
        (one, tuning(splits=2)),
        (eight, tuning()),
        (few, tuning(splits=8)),
        (few, tuning(splits=4)),
    ]:
        yield _attention(case, variant, small=small)
    # Rows that are bf16 already: tells whether it is the typing of words that fails or costs.
    yield dataclasses.replace(
        _attention(one, tuning(), small=small), label="rows of bf16", prepare=_numbers
    )


def _numbers(given: tuple[Tree, Array, Tree]) -> tuple[Tree, Array, Tree]:
    """Operands of sparse attention with rows of numbers instead of words."""
    query, slots, location = given
    return query, jax.jit(partial(unpack, dtype=jnp.bfloat16))(slots), location


def _attention(case: SparseAttention, tuning: sparse_triton.Tuning, *, small: bool) -> Variant:
    case = case.small() if small else case
    inputs = sparse_cases.glm(
        requests=3,
        queries=2,
        heads=case.heads,
        top_k=512,
        slots=2048,
        selected=(512, 300, 0),
        layer=1,
    )
    return Variant(
        case=case,
        label=_label(tuning),
        call=partial(sparse_triton.sparse_attention, tuning=tuning, interpret=small),
        exact=_exact_attention,
        step=sparse_attention.step,
        small=tuple(jnp.asarray(array) for array in inputs[:3]),
        small_options=_options(inputs),
        options=case.options,
    )


def _options(inputs: sparse_cases.Inputs) -> dict[str, Any]:
    return {name: getattr(inputs, name) for name in inputs._fields[3:7]}


def _exact_attention(
    query: Float[Array, "R T H width"],
    *rest: Array,
    **options: Any,  # noqa: ANN401  # the options of the operation
) -> tuple[Array, Array]:
    return sparse_reference.sparse_attention(query.astype(jnp.float32), *rest, **options)


def scores(*, small: bool) -> Iterator[Variant]:
    """Of index scores: with one query the reads, with eight the products."""
    tuning = index_mosaic.Tuning
    eight = partial(tuning, buffers=1, turns=True)
    for queries, keys, tried in [
        (1, "bf16", [tuning()]),
        (
            8,
            "bf16",
            [
                eight(stages=6, held=True),
                eight(stages=6, held=True, ahead=1),
                eight(stages=6, ahead=1),
                eight(stages=6, held=True, turns=False),
            ],
        ),
        (
            1,
            "fp8",
            [
                tuning(rows=128, product=128, stages=8),
                tuning(rows=256, product=128, stages=6),
                tuning(rows=256, product=64, stages=6),
                tuning(rows=128, product=64, stages=12, consumers=3, registers=(152, 40)),
                tuning(rows=256, product=64, stages=6, consumers=3, registers=(152, 40)),
            ],
        ),
        (
            8,
            "fp8",
            [
                eight(stages=12, held=True, staged=True),
                eight(stages=12, held=True, staged=True, ahead=1),
                eight(stages=12, ahead=1),
                eight(stages=12, held=True, staged=True, turns=False),
            ],
        ),
    ]:
        for variant in tried:
            yield _scores(IndexScores(queries=queries, keys=keys), variant, small=small)


def _scores(case: IndexScores, tuning: index_mosaic.Tuning, *, small: bool) -> Variant:
    """The Mosaic kernel; where there is no GPU, the reference, since it runs nowhere else."""
    case = case.small() if small else case
    inputs = index_cases.glm(
        requests=3, queries=case.queries, positions=5000, visible=(4990, 1700, 0)
    )
    queries, weights, keys, visible = (jnp.asarray(array) for array in inputs)
    call = partial(index_mosaic.index_scores, tuning=tuning)
    return Variant(
        case=case,
        label=f"{case.keys} {_label(tuning)}",
        call=index_reference.index_scores if small else call,
        exact=_exact_scores,
        step=index_scores.step,
        small=(queries, weights, quantise(keys) if case.keys == "fp8" else keys, visible),
    )


def _exact_scores(queries: Array, weights: Array, keys: Keys, visible: Array) -> Array:
    queries = queries.astype(jnp.float32)
    if not isinstance(keys, ScaledKeys):
        keys = keys.astype(jnp.float32)
    return index_reference.index_scores(queries, weights, keys, visible)


def float32(*, small: bool) -> Iterator[Variant]:
    """The default kernels on float32 operands; only checked, their production size is not built."""
    yield _float32_scores(small=small)
    sizes = {"heads": 16, "width": 160, "value_width": 128}
    inputs = sparse_cases.random(queries=2, top_k=300, slots=600, selected=(300, 31), **sizes)
    tuning = sparse_triton.default_tuning(4, 300, 4)
    yield dataclasses.replace(
        _attention(SparseAttention(), tuning, small=small),
        small=tuple(jnp.asarray(array) for array in inputs[:3]),
        small_options=_options(inputs),
    )


def _float32_scores(*, small: bool) -> Variant:
    inputs = index_cases.glm(
        requests=3, queries=2, positions=5000, visible=(4990, 1700, 0), dtype="float32"
    )
    return dataclasses.replace(
        _scores(IndexScores(queries=2), index_mosaic.Tuning(), small=small),
        call=partial(index_triton.index_scores, interpret=small),
        small=tuple(jnp.asarray(array) for array in inputs),
    )


def _label(tuning: sparse_triton.Tuning | index_mosaic.Tuning) -> str:
    """Where a tuning differs from the defaults of its class."""
    usual = dataclasses.asdict(type(tuning)())
    changed = {
        name: value for name, value in dataclasses.asdict(tuning).items() if value != usual[name]
    }
    return ", ".join(f"{name} {value}" for name, value in changed.items()) or "default"


VARIANTS: dict[str, Callable[..., Iterator[Variant]]] = {
    "sparse_attention": attention,
    "index_scores": scores,
}
