"""A step of a little model that plugs the hierarchy in; for tests of `dhisparse_jax.plugin`."""

import jax
import jax.numpy as jnp

from dhisparse_jax import Geometry, HierarchyConfig, Policy, RowFormat, plugin

LAYERS = 3
WIDTH = 12
TOP_K = 6


def sizes(row=None, groups=(1, 2), policy=Policy.FIXED, **fields):
    row = row or RowFormat.mla(8, 4, "float32")
    geometry = Geometry(row=row, layers_per_pool=groups, top_k=TOP_K, scale=0.3)
    given = {"requests": 2, "capacity": 40, "hot_rows": 4, "tail": 4, "host_page": 8} | fields
    return HierarchyConfig(geometry=geometry, policy=policy, **given)


def rows(positions, layer, width=WIDTH):
    """Rows that positions and layers determine, [*positions, width]."""
    phase = positions[..., None].astype(jnp.float32) + 0.7 * jnp.asarray(layer, jnp.float32)
    place = jnp.arange(width, dtype=jnp.float32).reshape(*[1] * positions.ndim, width)
    return jnp.sin(phase * (1.0 + place))


def choose(positions):
    """Every fifth position, and the query's own."""
    old = jnp.arange(TOP_K - 1, dtype=jnp.int32)[None, None] * 5
    old = jnp.where(old <= positions[..., None], old, -1)
    return jnp.concatenate((positions[..., None], old), axis=-1)


def layer_of(step, layer, select=None):
    """One layer: what it attends to, and the step."""
    row = rows(step.positions, layer)
    attended, step = plugin.attend(step, layer, row, row[:, :, None] + 1.0, select=select)
    return attended.values[:, :, 0], step


def unrolled(state, cfg, accepted=None):
    """A step, layer by layer: what they attend to, added up, and the next state."""
    step, total, first = plugin.begin_step(state, cfg), 0.0, 0
    for layers in cfg.geometry.layers_per_pool:
        for layer in range(first, first + layers):
            chosen = choose(step.positions) if layer == first else None
            values, step = layer_of(step, layer, chosen)
            total = total + values
        first += layers
    return total, plugin.end_step(step, accepted)


def scanned(state, cfg):
    """The same step, with the layers of each group in a scan, rematerialised."""
    step, total, first = plugin.begin_step(state, cfg), 0.0, 0
    for group, layers in enumerate(cfg.geometry.layers_per_pool):
        step = plugin.select(step, group, choose(step.positions))

        @jax.checkpoint
        def one(step, layer):
            values, step = layer_of(step, layer)
            return step, values

        step, values = jax.lax.scan(one, step, jnp.arange(first, first + layers))
        total, first = total + values.sum(axis=0), first + layers
    return total, plugin.end_step(step)


def admitted(state, cfg, length=17):
    """All requests, with prompts of `length` and fewer positions."""
    prompt = [rows(jnp.arange(length), layer) for layer in range(LAYERS)]
    for request in range(cfg.requests):
        state = plugin.admit(state, cfg, request, prompt, length=length - 3 * request)
    return state
