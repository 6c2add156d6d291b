"""The machines of a mesh as one: every decode step is one program over all devices.

The state is put together for steps, and taken apart when somebody asks a machine for its part, as
whoever enters or leaves a row does. Rows of prompts are read by each device by itself, unless
experts are spread over several: then chunks of prompts are run together too.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

from dhisparse_jax.engine.agree import agree
from dhisparse_jax.engine.compiled import Hidden
from dhisparse_jax.engine.crew import Weights
from dhisparse_jax.engine.elsewhere import Elsewhere
from dhisparse_jax.engine.job import Job
from dhisparse_jax.engine.machine import Machine
from dhisparse_jax.engine.output import Packed, places, send_to_host
from dhisparse_jax.engine.request import Request
from dhisparse_jax.engine.seat import Chunk
from dhisparse_jax.engine.spread import (
    Tree,
    joined,
    lifted,
    lowered,
    part_of,
    shapes_of,
    shardings_of,
    specs_of,
)
from dhisparse_jax.hierarchy.places import partition_specs
from dhisparse_jax.mesh import AXES
from dhisparse_jax.model import Params
from dhisparse_jax.prefill import Prompt
from dhisparse_jax.speculation.schedule import Profile
from dhisparse_jax.step import DecodeState
from pallas_kernels.common.ids import NO_SLOT

ROWS: Any = P(AXES)
"""Arrays whose first axis the devices share."""

EVERYWHERE: Any = P()
"""Arrays that every device has."""

SELECTION: Any = P(None, None, AXES)
"""Arrays whose third axis they share."""


class Fleet:
    """Runs steps of several machines, and chunks of their prompts, together.

    Args:
        weights: on the mesh.
        machines: as `machines_of` gives them.

    Raises:
        UserError: in every process, if they were told to do different things.
    """

    def __init__(self, weights: Weights, machines: Sequence[Machine]) -> None:
        self._mesh, self._devices = weights.mesh, weights.here
        self._machines = machines
        self._here = [machine for machine in machines if not isinstance(machine, Elsewhere)]
        self._params, self._weights = weights.params, jax.tree.leaves(weights.params)
        self._draft_params = weights.draft.params
        self._gathers = len(self._here) < len(machines)
        self._whole: DecodeState | None = None
        self._profile: tuple[Profile, Profile] | None = None
        first = self._here[0]
        agree(told(first))
        self._like = shapes_of(first.cell())
        specs = jax.tree.map(lambda _: ROWS, self._like)
        hierarchy = dataclasses.replace(partition_specs(first.cfg, AXES), step=ROWS)
        specs = dataclasses.replace(specs, hierarchy=hierarchy)
        self._specs = jax.tree.map(
            lambda leaf, spec: spec if leaf.size else None, self._like, specs
        )
        selection: Any = SELECTION if first.cfg.recorded else None
        self._output = Packed(numbers=EVERYWHERE if self._gathers else ROWS, selection=selection)
        self._step = self._step_program()
        self._chunk = jax.jit(self._run_chunk, static_argnums=1, donate_argnums=2)
        self._places = deque(self._new_places())
        for machine in self._here:
            machine.fetch = self._take_apart

    def dispatch(self) -> Packed:
        """Launch some decode steps on all devices; see `Machine.dispatch`."""
        if self._whole is None:
            parts = [lifted(machine.take()) for machine in self._here]
            self._whole = joined(self._mesh, self._specs, parts)
        profile, place = self._on_all(self._here[0].meter.profile), self._places.popleft()
        self._whole, output = self._step(
            self._weights, self._draft_params, profile, self._whole, place
        )
        self._places.append(output)
        output = self._with_selection(output)
        send_to_host(output)
        return output

    def read(self, jobs: Sequence[Job]) -> None:
        """Run the chunks of those whose prompts are in the lowest pool, at most one a device.

        The other devices do the same work for nothing: all that share experts must take part.
        """
        if not jobs:
            return
        chunks = {job.home: job.chunk for job in jobs}
        pool = min(chunk.pool for chunk in chunks.values() if chunk)
        mine = [
            _chunk_in(pool, machine, chunks.get(number))
            for number, machine in enumerate(self._machines)
            if not isinstance(machine, Elsewhere)
        ]
        starts = [
            jax.device_put(np.full(1, chunk.start, np.int32), device)
            for chunk, device in zip(mine, self._devices, strict=True)
        ]
        operands = [(chunk.hidden, chunk.prompt) for chunk in mine]
        like, start = shapes_of(operands[0]), self._join_rows(starts)
        both = self._join_rows([lifted(each) for each in operands])
        both = self._chunk(self._params, pool, both, start)
        for chunk, device in zip(mine, self._devices, strict=True):
            chunk.hidden, chunk.prompt = lowered(part_of(both, device), like, device)
        for job in jobs:
            job.chunk = job.chunk if job.chunk and job.chunk.pool != pool else None

    def check(self, requests: Sequence[Request]) -> None:
        """Whether all processes have the same requests. Raises UserError where they have not."""
        agree({"the requests": list(requests)})

    def told(self, first: Any) -> Any:  # noqa: ANN401  # arrays
        """A token, int32 [1], that one process has, in all of them; the others give None."""
        if not self._gathers:
            return first
        mine = np.full(1, NO_SLOT, np.int32) if first is None else np.asarray(first)
        return np.max(multihost_utils.process_allgather(mine), axis=0)

    def _take_apart(self) -> None:
        """Give every machine its part of the state."""
        whole, self._whole = self._whole, None
        for machine, device in zip(self._here, self._devices, strict=True):
            machine.put(lowered(part_of(whole, device), self._like, device))

    def _on_all(self, profile: Profile) -> Profile:
        """The profile on every device; a new one is sent once."""
        if self._profile is None or self._profile[0] is not profile:
            specs = jax.tree.map(lambda _: EVERYWHERE, profile)
            parts = [jax.device_put(profile, device) for device in self._devices]
            self._profile = profile, joined(self._mesh, specs, parts)
        return self._profile[1]

    def _join_rows(self, parts: Sequence[Tree]) -> Tree:
        return joined(self._mesh, jax.tree.map(lambda _: ROWS, parts[0]), parts)

    def _step_program(self) -> Any:  # noqa: ANN401  # a jitted function
        step, draft = self._here[0].compiled.step, specs_of(self._draft_params)

        def local(*operands: Any) -> tuple[DecodeState, Packed]:  # noqa: ANN401  # of `packed_steps`
            *before, state, place = operands
            state, output = step(*before, lowered(state, self._like), place)
            if self._gathers:  # every process reads what all devices tell
                numbers = lax.all_gather(output.numbers, AXES, tiled=True)
                output = dataclasses.replace(output, numbers=numbers)
            return lifted((state, output))

        profile = Profile(step_seconds=EVERYWHERE, byte_seconds=EVERYWHERE)
        mapped = jax.shard_map(
            local,
            mesh=self._mesh,
            in_specs=(specs_of(self._weights), draft, profile, self._specs, self._output),
            out_specs=(self._specs, self._output),
            check_vma=False,
        )
        # Else the host pools would be taken for device arrays.
        shardings = shardings_of(self._mesh, self._specs, lifted(self._here[0].cell()))
        out_shardings = shardings, None
        return jax.jit(mapped, donate_argnums=(3, 4), keep_unused=True, out_shardings=out_shardings)

    def _new_places(self) -> list[Packed]:
        first = self._here[0]
        count = len(self._machines) if self._gathers else 1

        def placed(place: Packed, device: jax.Device) -> Packed:
            numbers = jnp.tile(place.numbers, count)
            return lifted(jax.device_put(dataclasses.replace(place, numbers=numbers), device))

        return [
            joined(self._mesh, self._output, [placed(place, device) for device in self._devices])
            for place in places(first.cfg, first.steps)
        ]

    def _with_selection(self, output: Packed) -> Packed:
        """What no step tells is empty."""
        if output.selection is not None:
            return output
        cfg, steps = self._here[0].cfg, self._here[0].steps
        shape = (steps, cfg.pools, cfg.requests * len(self._machines), cfg.queries, 0)
        nothing: Any = np.zeros(shape, np.int32)
        return dataclasses.replace(output, selection=nothing)

    def _run_chunk(self, params: Params, pool: int, both: Tree, start: jax.Array) -> Tree:
        """One chunk of a prompt on every device."""
        first = self._here[0]
        like = jax.eval_shape(lambda: _nobody(first, pool))

        def local(params: Params, both: Tree, start: jax.Array) -> Tree:
            hidden, prompt = lowered(both, like)
            return lifted(first.compiled.prefill(params, pool, hidden, prompt, start[0]))

        return jax.shard_map(
            local,
            mesh=self._mesh,
            in_specs=(specs_of(self._params), ROWS, ROWS),
            out_specs=ROWS,
            check_vma=False,
        )(params, both, start)


def told(machine: Machine) -> dict[str, object]:
    """What all processes have to be told alike, by name."""
    cfg, drafter = machine.cfg, machine.drafter
    sizes = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    draft = (type(drafter).__name__, drafter.length, drafter.taps)
    return sizes | {"steps": machine.steps, "chunk": machine.compiled.chunk, "draft": draft}


def resident_share(machines: Sequence[Machine]) -> float:
    """Part of the committed history that hot pages and tails have room for; 1 of nothing."""
    room, records = np.sum([machine.residency() for machine in machines], axis=0)
    return float(room / records) if records else 1.0


def _chunk_in(pool: int, machine: Machine, chunk: Chunk | None) -> Chunk:
    """The chunk of a machine in a pool; one of no prompt where it has none."""
    if chunk is not None and chunk.pool == pool:
        return chunk
    return Chunk(pool, *_nobody(machine, pool), 0)


def _nobody(machine: Machine, pool: int) -> tuple[Hidden, Prompt]:
    """A prompt without tokens in a pool."""
    prompt = machine.begin_prompt(pool, machine.sharing.nothing())
    return machine.embed((), 0), prompt
