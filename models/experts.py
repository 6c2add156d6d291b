"""Running the experts that tokens were routed to. Knows nothing about how they were chosen.

Where a mesh spreads the experts over an axis of devices, each of these runs its own on the tokens
of all, and gets back what the others made of its own tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from dhisparse_jax.mesh import EXPERT

# Up to this many experts, all of them run on every token. On two CPU cores (8 experts, top 2,
# width 256, inner 96) that takes 0.2 ms for 4 tokens and 3.6 ms for 512, against 0.4 and 7.8 ms
# with `ragged_dot`: without a grouped matmul in the backend, XLA expands `ragged_dot` to one
# masked product per expert over the sorted copies, which is `experts_per_token` times more.
_MAX_EXPERTS_ALL_RUN = 16


class Routing(NamedTuple):
    """Where each token goes: expert numbers, and float32 weights of their outputs."""

    experts: Int[Array, "*batch chosen"]
    weights: Float[Array, "*batch chosen"]


class Groups(NamedTuple):
    """Rows sorted by expert: how many each expert has, and which expert each row has."""

    sizes: Int[Array, " experts"]
    owner: Int[Array, " rows"]


Run = Callable[[Float[Array, "tokens width"], Routing], Float[Array, "tokens width"]]
"""The weighted sum of the outputs of the experts that are here; of others, the weight is 0."""

RunGroups = Callable[[Float[Array, "rows width"], Groups], Float[Array, "rows width"]]
"""Runs the expert of every row on it."""

Activation = Callable[[Float[Array, "*batch twice"]], Float[Array, "*batch inner"]]
"""From gate and up columns side by side to what the output matrix multiplies."""


def run_experts(
    x: Float[Array, "*batch width"],
    routing: Routing,
    gate_up: Float[Array, "experts width twice"],
    down: Float[Array, "experts inner width"],
    activation: Activation,
    experts: int,
) -> Float[Array, "*batch width"]:
    """The weighted sum of the chosen experts' outputs, in the dtype of the matrices.

    Args:
        x: normalised inputs.
        routing: experts of each of them.
        gate_up: gate columns, then up columns, of every expert that is here.
        down: output matrix of every expert that is here.
        activation: between the two.
        experts: how many there are on all devices.
    """
    every = _run_all if experts <= _MAX_EXPERTS_ALL_RUN else _run_sorted
    run = lambda tokens, own: every(tokens, own, gate_up, down, activation)
    return on_all_devices(x, routing, experts, down.shape[0], run)


def on_all_devices(
    x: Float[Array, "*batch width"], routing: Routing, experts: int, held: int, run: Run
) -> Float[Array, "*batch width"]:
    """What all experts make of the tokens of this device.

    Devices share the experts if one holds fewer than there are; then this runs under `shard_map`
    over the axis EXPERT, whose devices hold them in turn. Sums over devices are float32 and in the
    order of the axis wherever a token is, so that its result does not depend on where.

    Args:
        x: normalised inputs.
        routing: experts of each of them.
        experts: how many there are on all devices.
        held: how many are here.
        run: runs those.
    """
    tokens = x.reshape(-1, x.shape[-1])
    flat = Routing(*(part.reshape(tokens.shape[0], -1) for part in routing))
    if held == experts:
        return run(tokens, flat).reshape(x.shape)
    every, chosen = (lax.all_gather(part, EXPERT, tiled=True) for part in (tokens, flat))
    own = chosen.experts - lax.axis_index(EXPERT) * held
    here = (own >= 0) & (own < held)
    own = Routing(jnp.where(here, own, held), jnp.where(here, chosen.weights, 0.0))
    parts = run(every, own).reshape(experts // held, *tokens.shape)
    back = lax.all_to_all(parts, EXPERT, 0, 0).astype(jnp.float32)
    total = back[0]
    for part in back[1:]:
        total = total + part
    return total.astype(x.dtype).reshape(x.shape)


def _run_all(
    x: Float[Array, "tokens width"],
    routing: Routing,
    gate_up: Float[Array, "experts width twice"],
    down: Float[Array, "experts inner width"],
    activation: Activation,
) -> Float[Array, "tokens width"]:
    """Every expert on every token, as one wide MLP; unchosen experts get weight zero."""
    picks = jax.nn.one_hot(routing.experts, down.shape[0], dtype=jnp.float32)
    weights = jnp.sum(picks * routing.weights[..., None], axis=1).astype(down.dtype)
    wide = jnp.einsum("nd,edf->nef", x, gate_up)
    hidden = activation(wide) * weights[..., None]
    return jnp.einsum("nef,efd->nd", hidden, down)


def _run_sorted(
    x: Float[Array, "tokens width"],
    routing: Routing,
    gate_up: Float[Array, "experts width twice"],
    down: Float[Array, "experts inner width"],
    activation: Activation,
) -> Float[Array, "tokens width"]:
    """Every token only with the experts that it chose."""

    def run(rows: Float[Array, "rows width"], groups: Groups) -> Float[Array, "rows width"]:
        hidden = activation(jax.lax.ragged_dot(rows, gate_up, groups.sizes))
        return jax.lax.ragged_dot(hidden, down, groups.sizes)

    return run_groups(x, routing, down.shape[0], run)


def run_groups(
    x: Float[Array, "tokens width"], routing: Routing, experts: int, run: RunGroups
) -> Float[Array, "tokens width"]:
    """Copies of the tokens sorted by expert, one contiguous block per expert.

    Args:
        x: normalised inputs.
        routing: experts of each of them; number `experts` is one that is not here.
        experts: how many are here.
        run: runs them.
    """
    count, chosen = routing.experts.shape
    every = routing.experts.reshape(-1)
    order = jnp.argsort(every, stable=True)
    sizes = jnp.bincount(every, length=experts).astype(jnp.int32)
    owner = every[order]
    outputs = run(x[order // chosen], Groups(sizes, jnp.minimum(owner, experts - 1)))
    outputs = jnp.where((owner < experts)[:, None], outputs, 0)  # of no group: they may be anything
    outputs = outputs[jnp.argsort(order)].reshape(count, chosen, -1)
    return jnp.einsum("nkd,nk->nd", outputs, routing.weights.astype(outputs.dtype))
