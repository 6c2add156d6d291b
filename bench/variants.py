"""Variants of the kernels that have a choice, for `bench.tune`.

A variant is an operation with a tuning, at a production size, and a small problem to check it on.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from bench.ops import backup, draft_attention, index_scores, packed_products, retrieve
from bench.ops.index_scores import IndexScores
from pallas_kernels.backup import cases as backup_cases
from pallas_kernels.backup import reference as backup_reference
from pallas_kernels.backup import triton as backup_triton
from pallas_kernels.common.rows import WORD_BYTES
from pallas_kernels.common.triton_rows import Tuning, default_tuning
from pallas_kernels.draft_attention import cases as draft_cases
from pallas_kernels.draft_attention import reference as draft_reference
from pallas_kernels.draft_attention import triton as draft_triton
from pallas_kernels.index_scores import cases as index_cases
from pallas_kernels.index_scores import mosaic as index_mosaic
from pallas_kernels.index_scores import reference as index_reference
from pallas_kernels.index_scores import triton as index_triton
from pallas_kernels.index_scores.types import Keys, ScaledKeys, quantise
from pallas_kernels.packed_products import cases as packed_cases
from pallas_kernels.packed_products import reference as packed_reference
from pallas_kernels.packed_products import triton as packed_triton
from pallas_kernels.retrieve import cases as retrieve_cases
from pallas_kernels.retrieve import reference as retrieve_reference
from pallas_kernels.retrieve import triton as retrieve_triton

Tree = Any
"""A pytree of arrays."""

Operation = Callable[..., Tree]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A kernel with a tuning.

    Attributes:
        case: production size.
        name: of the case.
        label: what distinguishes the variant.
        call: the operation with its tuning, on the arrays of a call.
        exact: the reference on the same arrays, in float32.
        step: `step` of the operation's module.
        small: arrays of a small problem, with masked entries and poison.
        small_options: what the operation is told beside them.
        options: the same at production size.
        prepare: turns operands, or the arrays of a call, into what the variant wants, if it wants
            others.
    """

    case: Any
    name: str
    label: str
    call: Operation
    exact: Operation
    step: Callable[[Operation], Callable[..., Tree]]
    small: tuple[Tree, ...]
    small_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    prepare: Callable[[Tree], Tree] | None = None

    def prepared(self, given: Tree) -> Tree:
        """The operands, or the arrays of a call, as the variant wants them."""
        return given if self.prepare is None else self.prepare(given)


def scores(keys: str, *, small: bool) -> Iterator[Variant]:
    """Of index scores: with one query the reads, with eight the products."""
    usual = partial(index_mosaic.default_tuning, heads=32, scaled=keys == "fp8")
    one, eight = usual(1), usual(8)
    for queries, tuning in [
        (1, one),
        (1, dataclasses.replace(one, stages=6)),
        (1, dataclasses.replace(one, rows=192 - one.rows, stages=6)),
        (8, eight),
        (8, dataclasses.replace(eight, turns=False)),
    ]:
        case = IndexScores(queries=queries, keys=keys)
        yield _scores(case, tuning, usual(queries), small=small)


def _scores(
    case: IndexScores, tuning: index_mosaic.Tuning, usual: index_mosaic.Tuning, *, small: bool
) -> Variant:
    """The Mosaic kernel; on a CPU the reference, since the kernel is interpreted slowly."""
    case = case.small() if small else case
    kernel = partial(index_mosaic.index_scores, tuning=tuning)
    return Variant(
        case=case,
        name=f"R {case.requests} T {case.queries} {case.keys}",
        label=_label(tuning, usual),
        call=index_reference.index_scores if small else kernel,
        exact=_exact_scores,
        step=index_scores.step,
        small=_small_scores(case.queries, "bfloat16", scaled=case.keys == "fp8"),
    )


def _small_scores(queries: int, dtype: str, *, scaled: bool = False) -> tuple[Tree, ...]:
    inputs = index_cases.glm(
        requests=3, queries=queries, positions=5000, visible=(4990, 1700, 0), dtype=dtype
    )
    query, weights, keys, visible = (jnp.asarray(array) for array in inputs)
    return query, weights, quantise(keys) if scaled else keys, visible


def _exact_scores(queries: Array, weights: Array, keys: Keys, visible: Array) -> Array:
    if not isinstance(keys, ScaledKeys):
        keys = keys.astype(jnp.float32)
    return index_reference.index_scores(queries.astype(jnp.float32), weights, keys, visible)


def float32(*, small: bool) -> dict[str, Variant]:
    """The default kernels on float32 operands; only checked, their production size is not built."""
    usual = index_mosaic.Tuning()
    scores = dataclasses.replace(
        _scores(IndexScores(queries=2), usual, usual, small=small),
        call=partial(index_triton.index_scores, interpret=small),
        small=_small_scores(2, "float32"),
    )
    return {"index_scores": scores}


def copies(operation: str, words: int, *, small: bool) -> Iterator[Variant]:
    """Of `retrieve` and `backup`: records and programs in flight; small calls, where they wait."""
    usual = default_tuning(words)
    change = partial(dataclasses.replace, usual)
    many = [
        usual,
        change(records=2 * usual.records),
        change(records=max(1, usual.records // 2)),
        Tuning(records=1, warps=1, programs=132 * 32),
        change(records=2 * usual.records, warps=2 * usual.warps),
    ]
    if operation == "retrieve":  # a backup has a program for each run of records
        many[4:] = change(programs=132 * 2), change(programs=132 * 64)
    for tuning in many:
        yield _copy(operation, f"{words * WORD_BYTES}B_16MB", tuning, usual, small=small)
    for tuning in usual, change(records=1):
        yield _copy(operation, f"{words * WORD_BYTES}B_512", tuning, usual, small=small)


def _copy(operation: str, name: str, tuning: Tuning, usual: Tuning, *, small: bool) -> Variant:
    kernels, module, exact = {
        "retrieve": (retrieve_triton.retrieve, retrieve, retrieve_reference.retrieve),
        "backup": (backup_triton.backup, backup, backup_reference.backup),
    }[operation]
    case = module.CASES[name]
    case = case.small() if small else case
    return Variant(
        case=case,
        name=name,
        label=_label(tuning, usual),
        call=partial(kernels, tuning=tuning, interpret=small),
        exact=exact,
        step=module.step_of(case.sizes),
        small=_small_copies(operation, case.sizes.words),
    )


def _small_copies(operation: str, words: int) -> tuple[Tree, ...]:
    """With skipped entries, counts, moves and ids out of range."""
    if operation == "retrieve":
        inputs = retrieve_cases.random(width=words, slots=60, counts=(12, 0, 7), moves=9)
        rows = inputs.fetches.rows.at[0, :2].set(jnp.asarray((len(inputs.host), -2), jnp.int32))
        inputs = inputs._replace(fetches=inputs.fetches._replace(rows=rows))
        return jax.tree.map(jnp.asarray, tuple(inputs))
    hosts, slots, rows, sources, slots_of = backup_cases.random(widths=(words,), entries=33)
    sources[0, :2] = 64, -2
    each = tuple(slots[array] for array in slots_of)
    return jax.tree.map(jnp.asarray, (hosts, each, rows, sources))


def packed(*, small: bool) -> Iterator[Variant]:
    """Of products with packed matrices: strips, tiles, and how many are under way."""
    usual = packed_triton.Tuning()
    change = partial(dataclasses.replace, usual)
    for name in ("gate_48_rows", "down_48_rows"):
        case = dataclasses.replace(packed_products.CASES[name], room=48)  # rows that there are
        for tuning in (
            usual,
            change(stages=4),
            change(warps=4),
            change(columns=64, warps=4),
            change(columns=256),
            change(depth=128, stages=2),
            change(depth=32, stages=5),
        ):
            yield Variant(
                case=case.small() if small else case,
                name=name,
                label=_label(tuning, usual),
                call=partial(packed_triton.packed_products, tuning=tuning, interpret=small),
                exact=packed_reference.packed_products,
                step=packed_products.step,
                small=tuple(map(jnp.asarray, packed_cases.random(rows=40, channels=256))),
            )


def drafts(*, small: bool) -> Iterator[Variant]:
    """Of a draft's attention: blocks of positions, splits, and how many are under way."""
    usual = draft_triton.Tuning()
    change = partial(dataclasses.replace, usual)
    for name in ("dflash2_16_requests", "dflash2_1_request"):
        case = draft_attention.CASES[name]
        for tuning in (
            usual,
            change(stages=2),
            change(stages=4),
            change(block=32, stages=5),
            change(block=128, stages=2),
            change(programs=256),
            change(programs=1024),
            change(rows=8),
        ):
            yield Variant(
                case=case.small() if small else case,
                name=name,
                label=_label(tuning, usual),
                call=partial(draft_triton.draft_attention, tuning=tuning, interpret=small),
                exact=draft_reference.draft_attention,
                step=draft_attention.step,
                small=tuple(draft_cases.random(dtype="bfloat16")),
            )


def _label(tuning: Any, usual: Any) -> str:  # noqa: ANN401  # any operation's
    """Where a tuning differs from the usual one."""
    before = dataclasses.asdict(usual)
    changed = {
        name: value for name, value in dataclasses.asdict(tuning).items() if value != before[name]
    }
    return ", ".join(f"{name} {value}" for name, value in changed.items()) or "default"


VARIANTS: dict[str, Callable[..., Iterator[Variant]]] = {
    "index_scores": partial(scores, "bf16"),
    "index_scores_fp8": partial(scores, "fp8"),
    "retrieve": partial(copies, "retrieve", 672),
    "retrieve_4608B": partial(copies, "retrieve", 1152),
    "retrieve_656B": partial(copies, "retrieve", 164),
    "backup": partial(copies, "backup", 672),
    "packed_products": packed,
    "draft_attention": drafts,
}
"""Copies of 2,688 B records where the name does not say another size."""
