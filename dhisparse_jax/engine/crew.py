"""A machine for every device of a mesh, and the weights that they have."""

import dataclasses

import jax
from jax.sharding import Mesh

from dhisparse_jax.engine.elsewhere import Elsewhere
from dhisparse_jax.engine.machine import Machine
from dhisparse_jax.engine.seat import Seat
from dhisparse_jax.engine.spread import is_here, on_mesh, part_of
from dhisparse_jax.errors import UserError
from dhisparse_jax.mesh import EXPERT
from dhisparse_jax.model import Params
from dhisparse_jax.speculation.protocol import Draft
from dhisparse_jax.speculation.schedule import Rule


@dataclasses.dataclass(frozen=True)
class Weights:
    """Of the model and of the draft, on a mesh.

    Attributes:
        mesh: the devices.
        params: of the model; routed experts may be spread over the axis EXPERT.
        draft: who proposes, with its weights.
    """

    mesh: Mesh
    params: Params
    draft: Draft

    @classmethod
    def on(cls, mesh: Mesh, params: Params, draft: Draft) -> "Weights":
        """Weights that are not on the mesh yet go to every device of it."""
        params, own = on_mesh(mesh, params), on_mesh(mesh, draft.params)
        return cls(mesh, params, dataclasses.replace(draft, params=own))

    @property
    def here(self) -> list[jax.Device]:
        """Devices of this process."""
        return [device for device in self.mesh.devices.flat if is_here(device)]

    def first(self) -> tuple[Params, Draft, Seat]:
        """What the first machine of this process is made with."""
        device = self.here[0]
        return (*self.part(device), Seat(device, beside=len(self.here)))

    def part(self, device: jax.Device) -> tuple[Params, Draft]:
        """What one of them has."""
        own = part_of(self.draft.params, device)
        return part_of(self.params, device), dataclasses.replace(self.draft, params=own)


def machines_of(weights: Weights, first: Machine, rule: Rule) -> tuple[Machine, ...]:
    """A machine for every device, in the order of the mesh.

    Args:
        weights: on the mesh.
        first: the machine of this process's first device, which the others are like.
        rule: how many proposals are verified.

    Raises:
        UserError: the time per token is bounded, of which every process would measure its own.
    """
    if first.stepwise and len(weights.here) < weights.mesh.size:
        raise UserError("a bound on the time per token needs the whole mesh in one process")
    together = weights.mesh.shape[EXPERT] > 1
    first.together, first.named_by = together, weights.params

    def machine(device: jax.Device) -> Machine:
        if device == weights.here[0]:
            return first
        if not is_here(device):
            return Elsewhere(first)
        params, draft = weights.part(device)
        seat = Seat(device, first.compiled)
        chunk = first.compiled.chunk
        made = Machine(first.model, params, first.cfg, chunk, draft, rule, first.steps, seat)
        made.stepwise, made.together = first.stepwise, together
        made.named_by = weights.params
        return made

    return tuple(machine(device) for device in weights.mesh.devices.flat)
