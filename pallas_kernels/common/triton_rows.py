"""A Pallas-Triton copy of records by index, between any two memories that the GPU can address.

One program copies `RECORDS` records; a record is read and written as one masked block of words. The
link is limited by reads per second, so a record is one contiguous run and many programs are in
flight. What would have to change when Pallas-Triton goes: the same loop as Mosaic GPU TMA copies.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

RECORDS = 4
WARPS = 4


def copy_records(
    source: Int[Array, "N W"],
    target: Int[Array, "M W"],
    rows: Int[Array, " n"],
    places: Int[Array, " n"],
) -> Int[Array, "M W"]:
    """`target` with record `rows[i]` of `source` at `places[i]`, in place; -1 in either skips.

    Either array may be of memory kind `pinned_host`. Offsets are 64 bit.
    """
    count = rows.shape[0]
    pad = -count % RECORDS
    rows, places = (jnp.pad(ids, (0, pad), constant_values=-1) for ids in (rows, places))
    whole = pl.BlockSpec(memory_space=pl.ANY)
    ids = pl.BlockSpec((RECORDS,), lambda i: (i,))
    call = pl.pallas_call(
        functools.partial(_copy_kernel, words=source.shape[1]),
        grid=((count + pad) // RECORDS,),
        in_specs=[ids, ids, whole, whole],
        out_specs=whole,
        out_shape=jax.typeof(target),
        input_output_aliases={3: 0},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        name="copy_records",
    )
    return call(rows, places, source, target)


def _copy_kernel(
    rows_ref: jax.Ref,
    places_ref: jax.Ref,
    source_ref: jax.Ref,
    _: jax.Ref,
    target_ref: jax.Ref,
    *,
    words: int,
) -> None:
    rows, places = rows_ref[...], places_ref[...]
    column = jnp.arange(pl.next_power_of_2(words), dtype=jnp.int32)[None]
    live = ((rows >= 0) & (places >= 0))[:, None] & (column < words)
    safe_rows = jnp.where(rows < 0, 0, rows)[:, None]
    safe_places = jnp.where(places < 0, 0, places)[:, None]
    records = plgpu.load(source_ref.at[safe_rows, column], mask=live, other=0)
    plgpu.store(target_ref.at[safe_places, column], records, mask=live)
