"""The state on devices: where its arrays are, and how it is split over several devices.

Over several devices, every one has a hierarchy of its own, of `cfg.requests` rows: the state of all
of them is one pytree whose leaves are those of the devices side by side. A step that maps over the
devices (`jax.shard_map`) sees its own part, with all ids in it.
"""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy import state as states
from dhisparse_jax.hierarchy.state import HierarchyState

BY_POOL = frozenset(
    ("budget", "hot_records", "miss_rate", "ghost", "looked", "refetched", "tried", "saved")
).union(states.PlanCounts._fields, ("selection",))
"""The leaves whose first axis is pools, and whose second one is requests."""


Axis = str | tuple[str, ...]
"""One axis of a mesh, or several as one."""


def partition_specs(cfg: HierarchyConfig, axis: Axis) -> HierarchyState:
    """How the state is split over the devices of a mesh axis, for `jax.shard_map`.

    On a GPU or TPU, give `jax.shard_map` also `check_vma=False`: JAX does not check what its Pallas
    kernels return.

    Args:
        cfg: sizes of the hierarchy of one device.
        axis: name of the mesh axis, or of several.

    Returns:
        The state with a `PartitionSpec` in place of each array.

    Examples:
        Tokens `[8, 1]` for a step, four rows on each of two devices:

            cfg = HierarchyConfig(..., requests=4)
            state, specs = plugin.init(cfg, mesh, "data"), plugin.partition_specs(cfg, "data")
            split = (specs, PartitionSpec("data"))
            step = jax.shard_map(step, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
            state, logits = jax.jit(step, donate_argnums=0)(state, tokens)
    """
    check_config(cfg)

    def spec(path: tuple[Any, ...], _: jax.ShapeDtypeStruct) -> PartitionSpec:
        name = name_of(path)
        if name == "step":
            return PartitionSpec()
        return PartitionSpec(None, axis) if name in BY_POOL else PartitionSpec(axis)

    return jax.tree_util.tree_map_with_path(spec, states.abstract(cfg))


def abstract(
    cfg: HierarchyConfig, mesh: Mesh | None = None, axis: Axis | None = None
) -> HierarchyState:
    """Shapes, dtypes and shardings of the state, as `init` makes it.

    For `jax.eval_shape`, for `jit(...).lower(...)` ahead of time, and for restoring a checkpoint:
    the shardings say which arrays are in host memory.

    Args:
        cfg: sizes of the hierarchy, of one device if there are several.
        mesh: devices; None: the first one.
        axis: name of the mesh axis that requests are split over; given with a mesh.

    Returns:
        The state with a `jax.ShapeDtypeStruct` in place of each array.

    Raises:
        UserError: one of mesh and axis is given without the other, the mesh has no such axis, or
            `cfg` is something else.
    """
    check_config(cfg)
    mesh, axis = _split(mesh, axis) or (_one_device(), "all")
    host = states.host_sharding(mesh.devices.flat[0]).memory_kind

    def placed(
        path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, spec: PartitionSpec
    ) -> jax.ShapeDtypeStruct:
        shape = whole_shape(leaf.shape, mesh, spec)
        kind = host if name_of(path) in states.HOST_LEAVES else None
        sharding = NamedSharding(mesh, spec, memory_kind=kind)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    specs = partition_specs(cfg, axis)
    return jax.tree_util.tree_map_with_path(placed, states.abstract(cfg), specs)


def init(
    cfg: HierarchyConfig, mesh: Mesh | None = None, axis: Axis | None = None
) -> HierarchyState:
    """An empty hierarchy: no request, no record. Arguments and errors as in `abstract`.

    Over a mesh, every device has `cfg.requests` rows; `partition_specs` has an example.
    """
    check_config(cfg)
    split = _split(mesh, axis)
    if split is None:
        return states.init(cfg)

    def allocate(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        fill = states.FILL.get(name_of(path), 0)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # an array has a part on every device here
            sizes = zip(index, leaf.shape, strict=True)
            return np.full([len(range(*at.indices(size))) for at, size in sizes], fill, leaf.dtype)

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)

    return jax.tree_util.tree_map_with_path(allocate, abstract(cfg, *split))


def check_config(cfg: object) -> None:
    """Whether these are sizes of a hierarchy. Raises UserError where they are not."""
    if not isinstance(cfg, HierarchyConfig):
        raise UserError(f"cfg is a {type(cfg).__name__}; it must be a HierarchyConfig")


def _split(mesh: Mesh | None, axis: Axis | None) -> tuple[Mesh, Axis] | None:
    """Devices, and the axis that requests are split over; None for one device."""
    if mesh is None and axis is None:
        return None
    if mesh is None:
        raise UserError(f"there is an axis, {axis!r}, but no mesh: give both or neither")
    if axis is None:
        raise UserError(
            f"there is a mesh of {mesh.size} devices, but no axis that requests are split over: "
            f"give one of {', '.join(map(repr, mesh.axis_names))}, or no mesh"
        )
    for name in (axis,) if isinstance(axis, str) else axis:
        if name not in mesh.axis_names:
            raise UserError(f"the mesh has no axis {name!r}; its axes are {mesh.axis_names}")
    return mesh, axis


def whole_shape(shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec) -> tuple[int, ...]:
    """Shape of an array whose parts have `shape`: 2 devices with 3 rows each have 6 rows."""
    axes = [(part,) if isinstance(part, str) else part or () for part in spec]
    axes += [()] * (len(shape) - len(axes))
    sizes = zip(shape, axes, strict=True)
    return tuple(size * math.prod(mesh.shape[axis] for axis in over) for size, over in sizes)


def _one_device() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), ("all",), axis_types=(AxisType.Auto,))


def name_of(path: tuple[Any, ...]) -> str:
    """Field of a leaf; index keys in two parts have names of their own."""
    return getattr(path[-1], "name", "")
