"""What cells of one draft have in device memory: weights, the draft's, and what is replayed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Int

from bench.replayed import ReplayedDraft, followed
from bench.shard_replay import Replay, ShardParams
from bench.shard_setup import Setup
from bench.shard_weights import random_like
from dhisparse_jax.models.draft.drafter import DrafterParams


class Loaded(NamedTuple):
    """What is in memory for all cells of one draft.

    Attributes:
        setup: shapes.
        params: weights, with what is replayed.
        draft_params: of the draft.
        draft_bytes: weights of the draft alone.
    """

    setup: Setup
    params: Any
    draft_params: Any
    draft_bytes: int


def load(
    setup: Setup,
    weights: Any,  # noqa: ANN401
    chosen: Int[np.ndarray, "traces rows K"],
    context: int,
    survival: Sequence[float],
) -> Loaded:
    """What is replayed, and the draft's weights, on the device."""
    config, shapes = setup.model.config, setup.params.replay
    rng = np.random.default_rng(0)
    replay = replay_arrays(
        shapes,
        chosen[:, : shapes.selections.shape[1]],
        paths(setup, len(chosen)),
        rng.integers(0, config.vocab_size, shapes.text.shape, np.int32),
        context,
    )
    size, draft = draft_of(setup, weights, replay, survival)
    return Loaded(setup, ShardParams(weights=weights, replay=replay), draft, size)


def paths(setup: Setup, traces: int) -> Int[np.ndarray, "selections R"]:
    """Which trace each selection and request follows: one that has the rate of the pool."""
    model, requests = setup.model, setup.params.replay.text.shape[0]
    rates = [model.geometry.rate(pool) for pool in range(model.geometry.pools)]
    each = traces // len(set(rates))
    first = [sorted(set(rates)).index(rate) * each for rate in rates]
    return followed(sum(model.selections), requests, each) + np.repeat(first, model.selections)[
        :, None
    ].astype(np.int32)


def draft_of(
    setup: Setup,
    weights: Any,  # noqa: ANN401
    replay: Replay,
    survival: Sequence[float],
) -> tuple[int, Any]:
    """Bytes of the draft's own weights, and what the drafter takes; nothing without one."""
    drafter = setup.drafter
    if not drafter.length:
        return 0, ()
    shapes = setup.draft_params.inner
    own = random_like(shapes["draft"], -1 % 2**20)
    embedding, head = setup.model.vocabulary_of(weights)
    inner = DrafterParams(draft=own, embedding=embedding, head=head)
    profile = [*survival, *[survival[-1]] * drafter.length][: drafter.length]
    params = ReplayedDraft(
        inner=inner,
        on=replay.on,
        text=replay.text,
        survival=jnp.asarray(profile, jnp.float32),
        key=jax.random.key(7),
    )
    return sum(leaf.nbytes for leaf in jax.tree.leaves(own)), params


def replay_arrays(shapes: Any, selections: Any, trace: Any, text: Any, history: int) -> Any:  # noqa: ANN401
    """`shard_model.Replay` with its arrays on the device."""
    values = {
        "on": jnp.asarray(True),
        "selections": jnp.asarray(selections),
        "trace": jnp.asarray(trace),
        "history": jnp.int32(history),
        "text": jnp.asarray(text),
    }
    device = SingleDeviceSharding(jax.devices()[0])
    return type(shapes)(**{name: jax.device_put(leaf, device) for name, leaf in values.items()})
