"""The host loop around the jitted step: requests in, events out. No arithmetic on tokens here.

request.py   what a caller asks for
events.py    what the engine reports while it runs
memory.py    sizes of the state, and whether they fit
meter.py     seconds of a step and of a fetched byte, for the schedule of verification
compiled.py  the jitted functions of one engine
host_pages.py  who has which page of host memory
prefixes.py  which known text begins as a new one does
sharing.py   host pages of requests, and what one takes over from a text in them
watch.py     who is told of what changes the hierarchy
machine.py   the device half: what can be done to a row
session.py   a request outside of its row and its host pages
exchange.py  what leaves a row and comes back: in host pages, or as a session
job.py       a request on its way through the engine
ledger.py    what requests hold, and whether another one fits
roster.py    who is in which row, who waits, who makes room
flight.py    dispatches between their launch and their landing
step_times.py  what a step takes, by how many requests take part
pace.py      how many may run at once, under a bound on the time per token
engine.py    continuous batching over a fixed number of request rows
recording.py  what every step selects, in a file, and read back
store.py     sessions on disk
replay.py    requests that arrive over time
forced.py    teacher forcing: logits of given tokens through the same prefill and decode path

Examples:
    A model of one layer whose residual stream is its token, and whose head is the next one:

    >>> import jax.numpy as jnp
    >>> from dhisparse_jax import Engine, Geometry, HierarchyConfig, IndexInputs, Policy, Request
    >>> from dhisparse_jax import RowFormat
    >>> from dhisparse_jax.engine.events import NewTokens
    >>> from dhisparse_jax.model import Ran
    >>> class Counts:
    ...     vocabulary, context = 8, 32
    ...     geometry = Geometry(
    ...         row=RowFormat.mla(6, 2, "float32"),
    ...         layers_per_pool=(1,),
    ...         top_k=4,
    ...         index_width=8,
    ...         index_dtype="float32",
    ...         scale=1.0,
    ...     )
    ...
    ...     def embed(self, params, tokens):
    ...         return params[tokens]
    ...
    ...     def run_group(
    ...         self, params, pool, x, positions, open_group, attend, taps=(), beside=None
    ...     ):
    ...         query = x[:, :, None]  # one head
    ...         weights = jnp.ones(query.shape[:3])
    ...         opened = open_group(IndexInputs(queries=query, weights=weights, keys=x))
    ...         attended, opened = attend(opened, 0, x, query)
    ...         return Ran(x, (), opened)
    ...
    ...     def logits(self, params, x):
    ...         return jnp.roll(x, 1, axis=-1)
    >>> cfg = HierarchyConfig(
    ...     geometry=Counts.geometry, policy=Policy.ADAPTIVE, requests=1, capacity=32, hot_rows=8
    ... )
    >>> engine = Engine(Counts(), jnp.eye(8), cfg, chunk=8)
    >>> request = Request(name="count", prompt=(1, 2), max_new_tokens=3)
    >>> [event.tokens for event in engine.run([request]) if isinstance(event, NewTokens)]
    [(3,), (4,), (5,)]
"""
