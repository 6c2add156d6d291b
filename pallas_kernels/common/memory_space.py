"""Re-typing an array between host and device memory without moving a byte.

An array of memory kind `pinned_host` has a host-typed aval, and jnp operations refuse to mix it
with device arrays. Where the backend can address host memory directly (a CPU always can), the type
is all that stands in the way: these two primitives change it and lower to nothing. Reads and
in-place updates then touch only the rows that they name.
"""

import functools
from collections.abc import Callable

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, Shaped


def _retype(name: str, space: jax.memory.Space) -> Callable[[jax.Array], jax.Array]:
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda aval: aval.update(memory_space=space))
    mlir.register_lowering(primitive, lambda ctx, operand: [operand])
    batching.defvectorized(primitive)
    primitive.def_impl(lambda x: jax.device_put(x, space))  # outside `jit` it is a copy
    return functools.partial(primitive.bind)


_as_device = _retype("dhisparse_as_device", jax.memory.Space.Device)
_as_host = _retype("dhisparse_as_host", jax.memory.Space.Host)


def is_host(array: Shaped[Array, "..."]) -> bool:
    """Whether `array` (traced or not) is typed as living in host memory."""
    return jax.typeof(array).memory_space == jax.memory.Space.Host


def as_device(array: Shaped[Array, "*n"]) -> Shaped[Array, "*n"]:
    """The same bytes, typed as device memory. Under `jit`, where they can be addressed."""
    return _as_device(array) if is_host(array) else array


def as_host(array: Shaped[Array, "*n"]) -> Shaped[Array, "*n"]:
    """The same bytes, typed as host memory: the inverse of `as_device`."""
    return array if is_host(array) else _as_host(array)
