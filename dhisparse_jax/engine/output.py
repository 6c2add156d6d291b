"""What decode steps tell the host, as one array in one of two places.

A GPU launches a dispatch as one graph of kernels. Every kernel whose operands have another address
than at the launch before costs the host some microseconds, and a new array makes temporary ones
move too. So outputs are written in turn to two places that are donated for it: one is read by the
host while the device writes the other. Reading them costs one copy.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef
from jaxtyping import Array, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.model import Params, ServedModel
from dhisparse_jax.pytree import state as pytree
from dhisparse_jax.speculation.schedule import Profile
from dhisparse_jax.step import DecodeState, Speculation, StepOutput, decode_steps
from pallas_kernels.plan.types import PlanCounts

REQUEST_AXES = (1, 1, 1, *(2 for _ in PlanCounts._fields))
"""Where requests are in the leaves that are packed, in their order."""


@pytree
class Packed:
    """A `StepOutput` of several steps.

    Attributes:
        numbers: all of its leaves but the selection, one after the other.
        selection: its selection.
    """

    numbers: Int[Array, " n"]
    selection: Int[Array, "steps pools R T K"]


def packed_steps(  # noqa: PLR0913  # what jit binds, and what it is called with
    steps: int,
    model: ServedModel,
    speculation: Speculation,
    cfg: HierarchyConfig,
    form: PyTreeDef,
    weights: list[Array],
    draft_params: Params,
    profile: Profile,
    state: DecodeState,
    place: Packed,
) -> tuple[DecodeState, Packed]:
    """`decode_steps` whose output goes to `place`; donate it and the state, keep what is unused.

    Nothing reads `place`, and JAX leaves out operands that nothing reads, donated or not.
    The state comes first: JAX hands a donated buffer to the first result of its shape, so every
    leaf of the state stays where it is. Weights come as leaves: taking a model's own containers
    apart at every call costs the host more than the call.
    """
    params = form.unflatten(weights)
    output, state = decode_steps(
        steps, model, speculation, cfg, params, draft_params, profile, state
    )
    return state, packed(output)


def packed(output: StepOutput) -> Packed:
    """The output of several steps as one array, and their selections."""
    leaves = (output.tokens, output.count, output.verified, *output.records)
    numbers = jnp.concatenate([leaf.reshape(-1) for leaf in leaves])
    return Packed(numbers=numbers, selection=output.selection)


def places(cfg: HierarchyConfig, steps: int) -> list[Packed]:
    """Two places for the output of so many steps."""
    selection = (steps, cfg.pools, cfg.requests, cfg.queries, cfg.recorded)
    numbers = sum(map(math.prod, _shapes(*selection[:4])))
    empty = lambda shape: jnp.zeros(shape, jnp.int32)
    return [Packed(numbers=empty(numbers), selection=empty(selection)) for _ in range(2)]


def send_to_host(packed: Packed) -> None:
    """Begin to copy what the device writes, once it has."""
    for leaf in (packed.numbers, packed.selection):
        if leaf.size:
            leaf.copy_to_host_async()


def unpacked(place: Packed, devices: int = 1) -> StepOutput:
    """The output as NumPy arrays; waits until it is written.

    Args:
        place: what the steps gave.
        devices: how many it is of: their numbers are one after the other, their requests too.
    """
    # Nothing to read where nothing is recorded, and not every process could.
    empty, told = np.zeros(place.selection.shape, np.int32), place.selection
    selection: Any = jax.device_get(told) if told.size else empty
    steps, pools, requests, queries = selection.shape[:4]
    shapes = _shapes(steps, pools, requests // devices, queries)
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    numbers = jax.device_get(place.numbers).reshape(devices, -1)
    parts = np.split(numbers, ends[:-1], axis=1)
    each = zip(parts, shapes, REQUEST_AXES, strict=True)
    leaves: list[Any] = [
        np.concatenate(list(part.reshape(devices, *shape)), axis=axis) for part, shape, axis in each
    ]
    tokens, count, verified, *records = leaves
    return StepOutput(
        tokens=tokens,
        count=count,
        verified=verified,
        records=PlanCounts(*records),
        selection=selection,
    )


def _shapes(steps: int, pools: int, requests: int, queries: int) -> list[tuple[int, ...]]:
    """Shapes of the leaves that are packed."""
    each, records = (steps, requests), (steps, pools, requests)
    return [(*each, queries), each, each, *(records for _ in PlanCounts._fields)]
