"""A decode step that also returns what every group selected, where it was found, and its outputs.

The step is the library's own: a model that hands everything on to another one stands between, and
keeps what passes.
"""

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.geometry import Geometry
from dhisparse_jax.hierarchy.group import OpenGroup, close_group
from dhisparse_jax.hierarchy.retrieve import Attended
from dhisparse_jax.hierarchy.select import IndexInputs
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.model import AttendFn, Beside, Opened, OpenFn, Params, Ran, ServedModel
from dhisparse_jax.precision import full_precision
from dhisparse_jax.pytree import state as pytree
from dhisparse_jax.verify import forward
from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.common.record_layout import as_words
from pallas_kernels.plan.types import PlanCounts


@pytree
class Chosen:
    """What one selection of a group found.

    Attributes:
        selection: int32 selected records of every query.
        location: int32 slot of each.
        records: what was in these slots when its layers had attended; zeros for none.
        counts: what the plan found.
    """

    selection: Int[Array, "R T K"]
    location: Int[Array, "R T K"]
    records: Int[Array, "R T K W"]
    counts: PlanCounts


@pytree
class Seen:
    """What one group of a step did.

    Attributes:
        chosen: its selections; one, but where layers select again.
        attended: what each layer's attention over records gave.
    """

    chosen: tuple[Chosen, ...]
    attended: tuple[Float[Array, "R T H value"], ...]


class Outcome(NamedTuple):
    """A step, as NumPy arrays.

    Attributes:
        logits: of every query.
        seen: a `Seen` per pool.
    """

    logits: Any
    seen: Any


class Subject:
    """An engine whose steps are observed.

    Args:
        engine: between runs.

    Attributes:
        engine: as given.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        observed = partial(observed_forward, engine.model, engine.cfg)
        self._forward = jax.jit(full_precision(observed), donate_argnums=1)

    def step(self, block: Int[np.ndarray, "R T"], accepted: Int[np.ndarray, " R"]) -> Outcome:
        """Run T tokens of every request, and commit the first `accepted` of each."""
        engine = self.engine
        logits, seen, state = self._forward(engine.params, engine.state, jnp.asarray(block))
        engine.state = engine.compiled.finish(state, jnp.asarray(accepted))
        return Outcome(*jax.device_get((logits, seen)))


def observed_forward(
    model: ServedModel,
    cfg: HierarchyConfig,
    params: Params,
    state: HierarchyState,
    tokens: Int[Array, "R T"],
) -> tuple[Float[Array, "R T V"], tuple[Seen, ...], HierarchyState]:
    """`verify.forward` of all queries, with what each of its groups did."""
    between = _Between(model, cfg)
    logits, _, state = forward(between, cfg, params, state, tokens)
    return logits, tuple(between.seen), state


class _Between:
    """A served model that is another one, and keeps what its groups do. For one trace."""

    def __init__(self, model: ServedModel, cfg: HierarchyConfig) -> None:
        self._model, self._cfg = model, cfg
        self.seen: list[Seen] = []

    @property
    def geometry(self) -> Geometry:
        return self._model.geometry

    @property
    def context(self) -> int:
        return self._model.context

    @property
    def vocabulary(self) -> int:
        return self._model.vocabulary

    def embed(self, params: Params, tokens: Int[Array, "R T"]) -> Float[Array, "R T D"]:
        return self._model.embed(params, tokens)

    def logits(self, params: Params, x: Float[Array, "R T D"]) -> Float[Array, "R T V"]:
        return self._model.logits(params, x)

    def run_group(
        self,
        params: Params,
        pool: int,
        x: Float[Array, "R T D"],
        positions: Int[Array, "R T"],
        open_group: OpenFn[Opened],
        attend: AttendFn[Opened],
        taps: tuple[int, ...] = (),
        beside: Beside | None = None,
    ) -> Ran[Opened]:
        attended: list[Float[Array, "R T H value"]] = []
        chosen: list[Chosen] = []

        def look(opened: Opened) -> None:
            # What `verify.forward` opens; the next selection may take the slots of this one.
            chosen.append(_chosen(self._cfg, pool, cast("OpenGroup", opened)))

        def open_it(index: IndexInputs, opened: Opened | None = None) -> Opened:
            if opened is None:
                return open_group(index)
            look(opened)
            return open_group(index, opened)

        def attend_it(
            opened: Opened,
            layer: int,
            row: Float[Array, "R E width"] | None,
            query: Float[Array, "R T H width"],
        ) -> tuple[Attended, Opened]:
            result, opened = attend(opened, layer, row, query)
            attended.append(result.values)
            return result, opened

        ran = self._model.run_group(params, pool, x, positions, open_it, attend_it, taps, beside)
        look(ran.opened)
        self.seen.append(Seen(chosen=tuple(chosen), attended=tuple(attended)))
        return ran


def _chosen(cfg: HierarchyConfig, pool: int, opened: OpenGroup) -> Chosen:
    number, _ = cfg.hot_pool_of(pool)
    slots, location = close_group(opened, cfg, pool).hot[number].slots, opened.plan.location
    found = as_words(slots[jnp.maximum(location, 0)], cfg.record_layout)
    return Chosen(
        selection=opened.selection,
        location=location,
        records=jnp.where((location != NO_SLOT)[..., None], found, 0),
        counts=opened.plan.counts,
    )
