"""The host loop around the jitted step: requests in, events out. No arithmetic on tokens here.

request       what a caller asks for
events        what the engine reports while it runs
engine        continuous batching over a fixed number of request rows
replay        requests that arrive over time
forced        teacher forcing: logits of given tokens through the same prefill and decode path
recording     what every step selects, in a file, and read back
store         sessions on disk

job           a request on its way through the engine
ledger        who has a row, and whether another request fits
roster        who is in which row, who waits, who makes room
pieces        prompts piece by piece, between steps
pace          how many may run at once, under a bound on the time per token
step_times    what a step takes, by how many requests take part
delivery      events, in their turn
whole         whether work was broken off
flight        dispatches between their launch and their landing

machine       the device half: what can be done to a row
cell          what decode steps change on one device
compiled      the jitted functions of one engine
output        what decode steps tell the host
meter         seconds of a step and of a fetched byte, for the schedule of verification
watch         who is told of what changes the hierarchy

host_pages    who has which page of host memory
prefixes      which known text begins as a new one does
sharing       host pages of requests, and what one takes over from a text in them
session       a request outside of its row and its host pages
exchange      what leaves a row and comes back: in host pages, or as a session

seat          where a machine is, and what it leaves to those that run several together
crew          a machine for every device of a mesh, and their weights
fleet         the machines of a mesh as one
elsewhere     a machine on a device of another process
spread        arrays of a mesh, and their parts on single devices
agree         whether all processes were told the same

memory        sizes of the state, and whether they fit
rates         what the machine's memories and link can do, measured
timing        how long a jitted operation takes
kernels       which implementation every operation gets here, and why

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
