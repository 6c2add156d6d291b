"""What the machine does: seconds of a step and of a fetched byte, measured while it runs."""

import time
from collections.abc import Callable
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.speculation.schedule import Profile
from pallas_kernels.plan.types import PlanCounts
from pallas_kernels.retrieve.api import retrieve as retrieve_op
from pallas_kernels.retrieve.types import Fetches

LINK_RECORDS = 4096
"""Records read at once to measure the link: enough to fill it."""

RUNS = 5
"""Timed calls, of which the median counts."""

DECAY = 0.9
"""Weight of the past in the moving average of a step's seconds."""

CHANGE = 0.25
"""Part by which a step's seconds must change to be sent to the device again: it decides between
seconds of fetching and tokens, which a small error hardly changes, and sending costs a step some
percent where steps take a millisecond."""


class Meter:
    """Keeps the profile that the schedule of verification reads.

    The shapes of a step are static, so its time without fetches does not depend on how many
    queries are verified: the table is flat, and what a shorter verification saves are fetches.

    Args:
        cfg: sizes of the hierarchy.
        state: if given, the link is measured on its largest host pool; else fetches cost nothing.

    Attributes:
        profile: what was measured so far; before the first step, a step of a second.
    """

    def __init__(self, cfg: HierarchyConfig, state: HierarchyState | None = None) -> None:
        self._cfg = cfg
        self._byte_seconds = 0.0 if state is None else link_seconds(cfg, state)
        self._record_bytes = np.array([cfg.record_bytes(pool) for pool in range(cfg.pools)])
        self._step_seconds = self._sent = 1.0
        self._dispatches = 0
        self.profile = self._profile()

    def add(self, seconds: float, records: PlanCounts) -> None:
        """Take in a dispatch: its wall time, and its records per step, pool and request."""
        self._dispatches += 1
        if self._dispatches == 1 or self._byte_seconds == 0.0:
            return  # the first one compiles; without a link there is nothing to weigh
        fetched = float(np.asarray(records.fetched).sum(axis=(0, 2)) @ self._record_bytes)
        rest = max(seconds - fetched * self._byte_seconds, 0.0) / records.fetched.shape[0]
        first = self._dispatches == 2
        past = 0.0 if first else DECAY
        self._step_seconds = past * self._step_seconds + (1.0 - past) * rest
        if abs(self._step_seconds - self._sent) > CHANGE * self._sent:
            self._sent = self._step_seconds
            self.profile = self._profile()

    def _profile(self) -> Profile:
        queries = self._cfg.requests * self._cfg.queries
        put = lambda value: jax.device_put(np.asarray(value, np.float32), jax.local_devices()[0])
        return Profile(
            step_seconds=put(np.full(queries + 1, self._step_seconds)),
            byte_seconds=put(self._byte_seconds),
        )


def link_seconds(cfg: HierarchyConfig, state: HierarchyState) -> float:
    """Seconds per byte of reading random records of the largest host pool."""
    pool = max(range(cfg.pools), key=cfg.record_words)
    host = state.pools[pool].host
    count = min(LINK_RECORDS, host.shape[0])
    rows = np.random.default_rng(0).integers(0, host.shape[0], count, np.int32)
    scratch = jnp.zeros((count, *host.shape[1:]), jnp.int32)
    places = jnp.arange(count, dtype=jnp.int32)
    read = jax.jit(_read)
    seconds = seconds_of(lambda: read(host, scratch, jnp.asarray(rows), places))
    return seconds / (count * cfg.record_bytes(pool))


def seconds_of(call: Callable[[], object]) -> float:
    """Median wall time of a call until its result is there, after one that may compile."""
    times = []
    for _ in range(RUNS + 1):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def _read(
    host: Int[Array, "H *W"],
    scratch: Int[Array, "n *W"],
    rows: Int[Array, " n"],
    places: Int[Array, " n"],
) -> Int[Array, "n *W"]:
    count = jnp.full(1, rows.shape[0], jnp.int32)
    return retrieve_op(host, scratch, Fetches(rows[None], places[None], count))
