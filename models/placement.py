"""Where weights go on a mesh: routed experts are spread over one axis, the rest is everywhere."""

import re

from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from dhisparse_jax.arrays import Place
from dhisparse_jax.mesh import EXPERT, MeshShape
from dhisparse_jax.models.stream import on_first_device

_EXPERTS = re.compile(r"\.mlp\.(gate_up|down|stored\..+)$")
"""Flat names of arrays whose first axis is the routed experts."""


def placement(mesh: Mesh | None) -> Place:
    """Where each array of a model goes, from its flat name and shape.

    Args:
        mesh: with the axes of `dhisparse_jax.mesh`; None: everything goes to the first device.
    """
    if mesh is None:
        return on_first_device
    lengths = MeshShape.of(mesh)

    def place(name: str, shape: tuple[int, ...]) -> Sharding:
        if not _EXPERTS.search(name):
            return NamedSharding(mesh, PartitionSpec())
        lengths.check_experts(shape[0])
        return NamedSharding(mesh, PartitionSpec(EXPERT))

    return place
