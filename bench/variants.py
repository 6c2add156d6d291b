"""Variants of the kernels that have a choice, for `bench.tune`.

A variant is an operation with a tuning, at a production size, and a small problem to check it on.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from bench.ops import index_scores
from bench.ops.index_scores import IndexScores
from pallas_kernels.index_scores import cases as index_cases
from pallas_kernels.index_scores import reference as index_reference
from pallas_kernels.index_scores import triton as index_triton

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

    case: IndexScores
    label: str
    call: Operation
    exact: Operation
    step: Callable[[Operation], Callable[..., Tree]]
    small: tuple[Array, ...]
    small_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    prepare: Callable[[Tree], Tree] = lambda operands: operands


def scores(*, small: bool) -> Iterator[Variant]:
    """Of index scores: with one query the reads, with eight the products."""
    tuning = index_triton.Tuning
    one, eight = IndexScores(queries=1), IndexScores(queries=8)
    for case, variant in [
        (one, tuning()),
        (one, tuning(stages=4)),
        (one, tuning(warps=8, stages=4)),
        (eight, tuning(block=64, steps=48, queries=8, product=2)),
        (eight, tuning(block=64, steps=48, queries=4, product=4)),
        (eight, tuning(block=128, steps=24, queries=8, product=4, warps=8)),
        (eight, tuning(block=64, steps=48, queries=8, product=8, warps=8)),
    ]:
        yield _scores(case, variant, "bfloat16", small=small)


def _scores(case: IndexScores, tuning: index_triton.Tuning, dtype: str, *, small: bool) -> Variant:
    case = case.small() if small else case
    inputs = index_cases.glm(
        requests=3, queries=case.queries, positions=5000, visible=(4990, 1700, 0), dtype=dtype
    )
    return Variant(
        case=case,
        label=_label(tuning),
        call=partial(index_triton.index_scores, tuning=tuning, interpret=small),
        exact=_exact_scores,
        step=index_scores.step,
        small=tuple(jnp.asarray(array) for array in inputs),
    )


def _exact_scores(queries: Array, weights: Array, keys: Array, visible: Array) -> Array:
    queries, keys = queries.astype(jnp.float32), keys.astype(jnp.float32)
    return index_reference.index_scores(queries, weights, keys, visible)


def float32(*, small: bool) -> Iterator[Variant]:
    """The default kernels on float32 operands; only checked, their production size is not built."""
    yield _scores(IndexScores(queries=2), index_triton.default_tuning(2, 4), "float32", small=small)


def _label(tuning: index_triton.Tuning) -> str:
    """Where a tuning differs from the defaults of its class."""
    usual = dataclasses.asdict(type(tuning)())
    changed = {
        name: value for name, value in dataclasses.asdict(tuning).items() if value != usual[name]
    }
    return ", ".join(f"{name} {value}" for name, value in changed.items()) or "default"


VARIANTS: dict[str, Callable[..., Iterator[Variant]]] = {
    "index_scores": scores,
}
