"""How many devices requests and experts are spread over. Knows nothing about states or weights."""

import dataclasses
from typing import TYPE_CHECKING

from dhisparse_jax.errors import UserError

if TYPE_CHECKING:
    from jax.sharding import Mesh

DATA, EXPERT = "data", "expert"

AXES = (DATA, EXPERT)
"""The axes of a mesh. Requests are spread over all devices, so over both of them; routed experts
over the second one, and every place of the first one has all of them."""


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """A mesh of data * expert devices.

    Attributes:
        data: devices, or groups of them, that have all weights.
        expert: devices that share the routed experts of such a group.

    Raises:
        UserError: an axis is shorter than 1.
    """

    data: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        """Refuse axes without a device."""
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise UserError(f"mesh axis {axis} is {getattr(self, axis)}; it must be at least 1")

    def __str__(self) -> str:
        """As `parse` reads it."""
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in AXES)

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """A mesh from a text such as `data=4,expert=2`; an axis that is left out is 1 long.

        Raises:
            UserError: there is no such axis, or one is named twice, or has no length.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            axis, _, size = part.strip().partition("=")
            if axis not in AXES:
                raise UserError(
                    f"mesh {text}: unknown axis {axis!r}; axes are {' and '.join(AXES)}, as in "
                    "data=4,expert=2"
                )
            if axis in sizes:
                raise UserError(f"mesh {text}: axis {axis} is named twice")
            if not size.isdecimal():
                raise UserError(f"mesh {text}: axis {axis} needs a number, as in {axis}=2")
            sizes[axis] = int(size)
        return cls(**sizes)

    @classmethod
    def of(cls, mesh: "Mesh | None") -> "MeshShape":
        """The shape of a mesh; None is one device."""
        return cls() if mesh is None else cls(**mesh.shape)

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return self.data * self.expert

    def rows(self, requests: int) -> int:
        """Request rows of each device, of so many in all.

        Raises:
            UserError: the devices do not divide them.
        """
        if requests % self.devices:
            near = max(1, requests // self.devices) * self.devices
            raise UserError(
                f"{requests} requests at the same time do not divide over the {self.devices} "
                f"devices of mesh {self}; take a multiple of {self.devices}, such as {near}"
            )
        return requests // self.devices

    def check_experts(self, experts: int) -> None:
        """Whether so many routed experts can be spread.

        Raises:
            UserError: the axis does not divide them.
        """
        if experts % self.expert:
            raise UserError(
                f"mesh {self}: {experts} experts do not divide over {self.expert} devices; use a "
                f"length of axis {EXPERT} that divides {experts}"
            )

    def mesh(self) -> "Mesh":
        """The first devices of all processes, neighbours along the expert axis.

        Raises:
            UserError: there are fewer, or a process has none of them.
        """
        import jax
        import numpy as np
        from jax.sharding import AxisType, Mesh

        found = jax.devices()
        if self.devices > len(found):
            virtual = f"--xla_force_host_platform_device_count={self.devices}"
            remedy = (
                f"; XLA_FLAGS={virtual} makes virtual ones" if found[0].platform == "cpu" else ""
            )
            raise UserError(
                f"mesh {self} needs {self.devices} devices, there are {len(found)}: make it "
                f"smaller{remedy}"
            )
        chosen = found[: self.devices]
        idle = set(range(jax.process_count())) - {device.process_index for device in chosen}
        if idle:
            raise UserError(
                f"mesh {self} has no device of process {min(idle)}; it needs more of the "
                f"{len(found)} devices, or there are too many processes"
            )
        grid = np.array(chosen).reshape(self.data, self.expert)
        return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


ONE_DEVICE = MeshShape()
"""No mesh: everything on one device."""
