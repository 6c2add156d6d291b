"""The hierarchy in place of the cache of a model of your own, without the engine.

A model declares what it keeps of a token (`RowFormat`) and which layers share a selection
(`Geometry.layers_per_pool`), calls `attend` in its attention module, and threads an `OpenStep`
through its layers; its jitted step begins with `begin_step` and ends with `end_step`.

step        begin_step, select, attend, read, end_step
opened      a step that has begun
prompt      admit: a request with the rows of its prompt; leave
rows        rows of a format as arrays, and as what is stored
choice      selections that the model makes itself
sizes       whether a state has the sizes that it is said to have

Under `jax.experimental.checkify` what only values can show is an error that names it: a position
that a query does not see, more positions than the capacity, a step without a request, a prompt for
a row that is taken. Without it such a query gets NaN (bytes of 255), which nobody overlooks.

Examples:
    One layer, where every token attends to itself and to the one before it:

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from dhisparse_jax import Geometry, HierarchyConfig, Policy, RowFormat, plugin
    >>> geometry = Geometry(
    ...     row=RowFormat.mla(6, 2, "float32"), layers_per_pool=(1,), top_k=2, scale=0.0
    ... )
    >>> cfg = HierarchyConfig(
    ...     geometry=geometry, policy=Policy.FIXED, requests=1, capacity=16, hot_rows=4
    ... )
    >>> def step(state, row):
    ...     cache = plugin.begin_step(state, cfg)
    ...     chosen = jnp.stack([cache.positions, cache.positions - 1], axis=-1)  # -1: none
    ...     attended, cache = plugin.attend(cache, 0, row, row[:, :, None], select=chosen)
    ...     return plugin.end_step(cache), attended.values
    >>> step = jax.jit(step, donate_argnums=0)
    >>> admit = jax.jit(plugin.admit, static_argnums=(1, 2), donate_argnums=0)
    >>> state = admit(plugin.init(cfg), cfg, 0)
    >>> for number in (1.0, 3.0, 6.0):
    ...     state, values = step(state, jnp.full((1, 1, 8), number))
    ...     print(values[0, 0, 0, 0])  # with a scale of 0, their mean
    1.0
    2.0
    4.5
    >>> state.length
    Array([3], dtype=int32)
"""

from dhisparse_jax.hierarchy.places import abstract as abstract
from dhisparse_jax.hierarchy.places import init as init
from dhisparse_jax.hierarchy.places import partition_specs as partition_specs
from dhisparse_jax.plugin.opened import OpenStep as OpenStep
from dhisparse_jax.plugin.prompt import admit as admit
from dhisparse_jax.plugin.prompt import leave as leave
from dhisparse_jax.plugin.rows import Rows as Rows
from dhisparse_jax.plugin.step import Selected as Selected
from dhisparse_jax.plugin.step import attend as attend
from dhisparse_jax.plugin.step import begin_step as begin_step
from dhisparse_jax.plugin.step import end_step as end_step
from dhisparse_jax.plugin.step import read as read
from dhisparse_jax.plugin.step import select as select
