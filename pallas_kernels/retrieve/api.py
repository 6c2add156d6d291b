"""Retrieval: host records to device slots, and slots to other slots, in one go."""

from jaxtyping import Array, Int

from pallas_kernels.common import tpu_records
from pallas_kernels.common.backends import Backend, resolve
from pallas_kernels.common.record_layout import words_of_record
from pallas_kernels.retrieve import reference, tpu, triton
from pallas_kernels.retrieve.types import Fetches, Moves


def retrieve(
    host: Int[Array, "N *_"],
    slots: Int[Array, "S *W"],
    fetches: Fetches,
    moves: Moves | None = None,
    *,
    backend: Backend | None = None,
) -> Int[Array, "S *W"]:
    """Copy host records into slots, bit exact, and slots into other slots.

    Lists may be empty. An entry with NO_SLOT on either side does nothing. Ids that are out of range
    never read or write anything else:

    - a row that the pool does not have, or a source that is no slot, leaves POISON in the target:
      NaN in every row format, so it cannot pass for a record;
    - a target that is no slot receives nothing.

    A record may be fetched into several slots, by one request or by several. Targets are distinct:
    a slot that two entries with different records name holds one of them, or parts of both. `plan`
    never makes such a list.

    Args:
        host: the host pool, int32 words; may be of memory kind `pinned_host`. Any size: offsets are
            64 bit.
        slots: the device slots, donated by the caller's `jit`.
        fetches: what to fetch; the time goes with its counts, not with its size.
        moves: what to copy from slot to slot; none by default.
        backend: the implementation; by default the one for the device JAX runs on.

    Returns:
        `slots` with the records in place; other slots are unchanged.

    Raises:
        ValueError: the records of the host pool and the slots are of different sizes.

    Examples:
        Record 3 goes to slot 0; of the list only the first entry counts:

        >>> import jax.numpy as jnp
        >>> from pallas_kernels.retrieve.api import retrieve
        >>> from pallas_kernels.retrieve.types import Fetches
        >>> host, slots = jnp.arange(8).reshape(4, 2), jnp.zeros((2, 2), jnp.int32)
        >>> fetches = Fetches(
        ...     rows=jnp.array([[3, 1]]), targets=jnp.array([[0, 1]]), counts=jnp.array([1])
        ... )
        >>> retrieve(host, slots, fetches)
        Array([[6, 7],
               [0, 0]], dtype=int32)
    """
    check_pools(host, slots)
    refusal = tpu_records.supports(host, slots)
    match resolve("retrieve", backend, refusal=None, tpu_refusal=refusal):
        case "tpu":
            return tpu.retrieve(host, slots, fetches, moves)
        case "triton":
            return triton.retrieve(host, slots, fetches, moves)
        case _:
            return reference.retrieve(host, slots, fetches, moves)


def check_pools(host: Int[Array, "N *_"], slots: Int[Array, "S *W"]) -> None:
    """Whether records of the host pool fit into the slots.

    Raises:
        ValueError: see `retrieve`.
    """
    if host.shape[1:] != slots.shape[1:]:
        words = [words_of_record(pool) for pool in (host, slots)]
        raise ValueError(
            f"records of {words[0]} words cannot be fetched into slots of {words[1]}; "
            "a record needs the size of a slot"
        )
