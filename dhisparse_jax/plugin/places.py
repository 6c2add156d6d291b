"""The state on devices: where its arrays are, and how it is split over several devices.

Over several devices, every one has a hierarchy of its own, of `cfg.requests` rows: the state of all
of them is one pytree whose leaves are those of the devices side by side. A step that maps over the
devices (`jax.shard_map`) sees its own part, with all ids in it.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy import state as states
from dhisparse_jax.hierarchy.state import HierarchyState

BY_POOL = frozenset(
    ("budget", "miss_rate", "ghost", "looked", "refetched", "tried", "saved", "selection")
) | frozenset(states.PlanCounts._fields)
"""The leaves whose first axis is pools, and whose second one is requests."""


def partition_specs(cfg: HierarchyConfig, axis: str) -> HierarchyState:
    """How the state is split over the devices of a mesh axis, for `jax.shard_map`.

    Args:
        cfg: sizes of the hierarchy of one device.
        axis: name of the mesh axis.

    Returns:
        The state with a `PartitionSpec` in place of each array.
    """

    def spec(path: tuple[Any, ...], _: jax.ShapeDtypeStruct) -> PartitionSpec:
        name = _name(path)
        if name == "step":
            return PartitionSpec()
        return PartitionSpec(None, axis) if name in BY_POOL else PartitionSpec(axis)

    return jax.tree_util.tree_map_with_path(spec, states.abstract(cfg))


def abstract(
    cfg: HierarchyConfig, mesh: Mesh | None = None, axis: str | None = None
) -> HierarchyState:
    """Shapes, dtypes and shardings of the state, as `init` makes it.

    For `jax.eval_shape`, for `jit(...).lower(...)` ahead of time, and for restoring a checkpoint:
    the shardings say which arrays are in host memory.

    Args:
        cfg: sizes of the hierarchy, of one device if there are several.
        mesh: devices; None: the first one.
        axis: name of the mesh axis that requests are split over.

    Returns:
        The state with a `jax.ShapeDtypeStruct` in place of each array.
    """
    mesh, axis = (_one_device(), "all") if mesh is None or axis is None else (mesh, axis)
    host = states.host_sharding(mesh.devices.flat[0]).memory_kind

    def placed(
        path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, spec: PartitionSpec
    ) -> jax.ShapeDtypeStruct:
        parts = [mesh.shape[axis] if part == axis else 1 for part in spec]
        parts += [1] * (len(leaf.shape) - len(parts))
        shape = tuple(size * part for size, part in zip(leaf.shape, parts, strict=True))
        kind = host if _name(path) in states.HOST_LEAVES else None
        sharding = NamedSharding(mesh, spec, memory_kind=kind)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    specs = partition_specs(cfg, axis)
    return jax.tree_util.tree_map_with_path(placed, states.abstract(cfg), specs)


def init(cfg: HierarchyConfig, mesh: Mesh | None = None, axis: str | None = None) -> HierarchyState:
    """An empty hierarchy: no request, no record. Arguments as in `abstract`."""
    if mesh is None or axis is None:
        return states.init(cfg)

    def allocate(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        fill = states.FILL.get(_name(path), 0)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # an array has a part on every device here
            sizes = zip(index, leaf.shape, strict=True)
            return np.full([len(range(*at.indices(size))) for at, size in sizes], fill, leaf.dtype)

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)

    return jax.tree_util.tree_map_with_path(allocate, abstract(cfg, mesh, axis))


def _one_device() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), ("all",), axis_types=(AxisType.Auto,))


def _name(path: tuple[Any, ...]) -> str:
    """Field of a leaf; index keys in two parts have names of their own."""
    return getattr(path[-1], "name", "")


def check_state(state: HierarchyState, cfg: HierarchyConfig) -> None:
    """Whether a state has the sizes of a configuration.

    Raises:
        UserError: it was made by another one; with the first array that differs.
    """
    wanted, wanted_form = jax.tree_util.tree_flatten_with_path(states.abstract(cfg))
    found, form = jax.tree_util.tree_flatten_with_path(state)
    if form != wanted_form:
        raise UserError("the state is of another geometry: make one by init with this cfg")
    for (path, leaf), (_, like) in zip(found, wanted, strict=True):
        if leaf.shape != like.shape or leaf.dtype != like.dtype:
            raise UserError(
                f"the state's {_name(path)} is {leaf.dtype} {leaf.shape}, and cfg says "
                f"{like.dtype} {like.shape}: make one by init with this cfg"
            )
