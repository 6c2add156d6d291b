"""What the Mosaic GPU kernels share: the parts of its interface that differ between versions."""

import inspect

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

_LOAD_TAKES_INDEX = "idx" in inspect.signature(plgpu.load).parameters and (
    inspect.signature(plgpu.load).parameters["idx"].default is inspect.Parameter.empty
)


def load(ref: jax.Ref, layout: plgpu.Layout) -> jax.Array:
    """The array of `ref` in registers, in `layout`, at whatever cost in bank conflicts."""
    index = (...,) if _LOAD_TAKES_INDEX else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)
