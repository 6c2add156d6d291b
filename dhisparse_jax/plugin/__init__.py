"""The hierarchy in place of the cache of a model of your own, without the engine.

A model declares what it keeps of a token (`RowFormat`) and which layers share a selection
(`Geometry.layers_per_pool`), calls `attend` in its attention module, and threads an `OpenStep`
through its layers; its jitted step begins with `begin_step` and ends with `end_step`.

step        begin_step, select, attend, read, end_step
prompt      admit: a request with the rows of its prompt
rows        rows of a format as arrays, and as what is stored
choice      selections that the model makes itself
sizes       whether a state has the sizes that it is said to have

Under `jax.experimental.checkify` what only values can show is an error that names it: a position
that a query does not see, more positions than the capacity, a step without a request, a prompt for
a row that is taken. Without it such a query gets NaN (bytes of 255), which nobody overlooks.
"""

from dhisparse_jax.hierarchy.places import abstract as abstract
from dhisparse_jax.hierarchy.places import init as init
from dhisparse_jax.hierarchy.places import partition_specs as partition_specs
from dhisparse_jax.hierarchy.requests import leave as leave
from dhisparse_jax.plugin.prompt import admit as admit
from dhisparse_jax.plugin.rows import Rows as Rows
from dhisparse_jax.plugin.step import OpenStep as OpenStep
from dhisparse_jax.plugin.step import Selected as Selected
from dhisparse_jax.plugin.step import attend as attend
from dhisparse_jax.plugin.step import begin_step as begin_step
from dhisparse_jax.plugin.step import end_step as end_step
from dhisparse_jax.plugin.step import read as read
from dhisparse_jax.plugin.step import select as select
