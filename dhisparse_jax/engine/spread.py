"""Arrays of a mesh, and their parts on single devices. No byte moves from one to the other."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from dhisparse_jax.hierarchy.places import whole_shape
from dhisparse_jax.hierarchy.state import HOST_KIND

Tree = Any
"""A pytree of arrays."""


def is_here(device: jax.Device) -> bool:
    """Whether this process owns a device."""
    return device.process_index == jax.process_index()


def joined(mesh: Mesh, specs: Tree, parts: Sequence[Tree]) -> Tree:
    """One pytree for all devices out of one for each.

    Args:
        mesh: the devices.
        specs: a `PartitionSpec` in place of each array.
        parts: of the devices of this process, in the order of the mesh; every array is on its
            device. Donating what is returned donates them.
    """

    def whole(spec: PartitionSpec, sharding: NamedSharding, *leaves: jax.Array) -> jax.Array:
        shape = whole_shape(leaves[0].shape, mesh, spec)
        return jax.make_array_from_single_device_arrays(shape, sharding, leaves)

    return jax.tree.map(whole, specs, shardings_of(mesh, specs, parts[0]), *parts)


def lifted(tree: Tree) -> Tree:
    """Arrays as devices can share them: numbers with an axis, and None for those without elements.

    XLA of jax 0.11 ends the process where `shard_map` passes an array without elements on.
    """

    def lift(leaf: jax.Array) -> jax.Array | None:
        if not leaf.size:
            return None
        return leaf if leaf.ndim else leaf.reshape(1)

    return jax.tree.map(lift, tree)


def lowered(tree: Tree, like: Tree, device: jax.Device | None = None) -> Tree:
    """The reverse of `lifted`.

    Args:
        tree: what was lifted.
        like: its shapes and dtypes before.
        device: where it is; None under `jit`.
    """

    def lower(own: Any, leaf: jax.Array | None) -> jax.Array:  # noqa: ANN401  # a shape
        if leaf is None:
            empty = np.zeros(own.shape, own.dtype)
            return jnp.asarray(empty) if device is None else jax.device_put(empty, device)
        return leaf if own.shape else leaf.reshape(())

    return jax.tree.map(lower, like, tree)


def shapes_of(tree: Tree) -> Tree:
    """Shapes and dtypes of arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def shardings_of(mesh: Mesh, specs: Tree, part: Tree) -> Tree:
    """Where the arrays of all devices are, from those of one; in its kind of memory."""

    def sharding(spec: PartitionSpec, leaf: jax.Array) -> NamedSharding:
        return NamedSharding(mesh, spec, memory_kind=leaf.sharding.memory_kind)

    return jax.tree.map(sharding, specs, part)


def part_of(whole: Tree, device: jax.Device) -> Tree:
    """What a device of this process has of the arrays."""

    def part(leaf: jax.Array) -> jax.Array:
        own = next(shard.data for shard in leaf.addressable_shards if shard.device == device)
        return _as_host(own, device) if leaf.sharding.memory_kind == HOST_KIND else own

    return jax.tree.map(part, whole)


def _as_host(part: jax.Array, device: jax.Device) -> jax.Array:
    """A part in host memory, of that type.

    JAX gives parts the type of device arrays wherever they are, and a program that takes one then
    ends the process. Of an array over a mesh it makes the right type, which `device_put` keeps.
    """
    here = NamedSharding(Mesh(np.array([device]), ("all",)), PartitionSpec(), memory_kind=HOST_KIND)
    whole = jax.make_array_from_single_device_arrays(part.shape, here, [part])
    return jax.device_put(whole, SingleDeviceSharding(device, memory_kind=HOST_KIND))


def specs_of(whole: Tree) -> Tree:
    """How arrays are spread over their mesh."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, whole)


def on_mesh(mesh: Mesh, tree: Tree) -> Tree:
    """The arrays on a mesh: those that are there already as they are, the others on every device.

    Every process puts its own, which must be the same as those of the others.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(leaf: Any) -> jax.Array:  # noqa: ANN401  # NumPy's or JAX's
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
            return leaf
        own = [jax.device_put(leaf, device) for device in mesh.devices.flat if is_here(device)]
        return jax.make_array_from_single_device_arrays(own[0].shape, everywhere, own)

    return jax.tree.map(place, tree)
