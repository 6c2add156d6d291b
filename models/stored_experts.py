"""Experts whose weights stay as small as a checkpoint stores them.

Their numbers become floats a slab of input channels at a time, inside the matrix product, so that
no expert is ever in memory as a whole in another form.
"""

from collections.abc import Callable

import jax.numpy as jnp
import ml_dtypes
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from dhisparse_jax.configs.quantised import FORMATS, WeightFormat
from dhisparse_jax.models.experts import Groups, Routing, on_all_devices, run_groups
from dhisparse_jax.models.quantised import decode_numbers

SLAB = 128
"""Input channels that are multiplied at a time: those of a block, where it is not smaller."""

_ROWS_BY_COLUMNS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)


PairActivation = Callable[
    [Float[Array, "rows inner"], Float[Array, "rows inner"]], Float[Array, "rows inner"]
]
"""From the outputs of gate and up to what the output matrix multiplies."""


class StoredMatrices(nnx.Module):
    """One matrix `[out, in]` of every expert, in the orientation and format of the checkpoint.

    Attributes:
        numbers: e4m3, or bytes of two e2m1.
        scales: a float32 or e8m0 number per block.
        weights: the format of both.
    """

    def __init__(self, experts: int, fan_in: int, fan_out: int, form: str) -> None:
        self.weights = FORMATS[form]
        numbers = jnp.uint8 if self.weights.packed else ml_dtypes.float8_e4m3fn
        self.numbers = nnx.Param(
            jnp.zeros((experts, *self.weights.stored_shape(fan_out, fan_in)), numbers)
        )
        self.scales = nnx.Param(
            jnp.ones((experts, *self.weights.scale_shape(fan_out, fan_in)), self.weights.scale)
        )

    def __call__(self, x: Float[Array, "rows in"], groups: Groups) -> Float[Array, "rows out"]:
        """Every row times the matrix of its expert, in the dtype of `x`.

        Sums are float32. Scales that are powers of two multiply the numbers, which changes no
        digit of them; others multiply the sums of a block. So no weight is ever rounded: the result
        differs from the exact one by at most `(in + 3) * 2^-24 * sum |x * weight|` and the last
        rounding, to the dtype of `x`.
        """
        numbers, scales = self.numbers[...], self.scales[...]
        inside = self.weights.scales_are_powers
        slab = max(SLAB, self.weights.block[1]) if inside else self.weights.block[1]
        count = -(-x.shape[1] // slab)
        x, numbers, scales = _padded(self.weights, x, numbers, scales, count * slab)
        out = numbers.shape[1]

        def add(total: Float[Array, "rows out"], number: Int[Array, ""]) -> tuple[Array, None]:
            take = lambda array, width: lax.dynamic_slice_in_dim(
                array, number * width, width, axis=array.ndim - 1
            )
            some = decode_numbers(take(numbers, numbers.shape[-1] // count), self.weights, x.dtype)
            factors = take(scales, slab // self.weights.block[1]).astype(jnp.float32)
            if inside:
                some = some * _spread(factors, self.weights, some.shape).astype(x.dtype)
            sums = lax.ragged_dot_general(
                take(x, slab),
                some,
                groups.sizes,
                _ROWS_BY_COLUMNS,
                preferred_element_type=jnp.float32,
            )
            if not inside:
                factors = jnp.repeat(factors[groups.owner, :, 0], self.weights.block[0], axis=1)
                sums = sums * factors[:, :out]
            return total + sums, None

        total = jnp.zeros((x.shape[0], out), jnp.float32)
        total, _ = lax.scan(add, total, jnp.arange(count, dtype=jnp.int32))
        return total.astype(x.dtype)


class StoredExperts(nnx.Module):
    """Gate, up and down matrices of all experts, which run only on the tokens that chose them."""

    def __init__(self, experts: int, width: int, inner: int, form: str) -> None:
        self.gate = StoredMatrices(experts, width, inner, form)
        self.up = StoredMatrices(experts, width, inner, form)
        self.down = StoredMatrices(experts, inner, width, form)
        self.count = experts

    def __call__(
        self, x: Float[Array, "*batch width"], routing: Routing, activation: PairActivation
    ) -> Float[Array, "*batch width"]:
        """The weighted sum of the chosen experts' outputs, in the dtype of `x`."""

        def run(rows: Float[Array, "rows width"], groups: Groups) -> Float[Array, "rows width"]:
            return self.down(activation(self.gate(rows, groups), self.up(rows, groups)), groups)

        held = self.down.numbers.shape[0]
        mine = lambda tokens, own: run_groups(tokens, own, held, run)
        return on_all_devices(x, routing, self.count, held, mine)


def _padded(
    weights: WeightFormat,
    x: Float[Array, "rows in"],
    numbers: Shaped[Array, "experts out stored"],
    scales: Shaped[Array, "experts out_blocks in_blocks"],
    width: int,
) -> tuple[Array, Array, Array]:
    """Operands with zeros behind the last input channel, so that there are `width` of them."""
    if x.shape[1] == width:
        return x, numbers, scales
    stored = weights.stored_shape(1, width)[1]
    blocks = width // weights.block[1]

    def pad(array: Array, size: int, value: int = 0) -> Array:
        sides = [(0, 0)] * (array.ndim - 1) + [(0, size - array.shape[-1])]
        return jnp.pad(array, sides, constant_values=value)

    return pad(x, width), pad(numbers, stored), pad(scales, blocks, 1)  # e8m0 has no zero


def _spread(
    factors: Float[Array, "experts out_blocks in_blocks"],
    weights: WeightFormat,
    shape: tuple[int, ...],
) -> Float[Array, "experts out in"]:
    """Scales of blocks as scales of numbers."""
    rows = jnp.repeat(factors, weights.block[0], axis=1)[:, : shape[1]]
    return jnp.repeat(rows, weights.block[1], axis=2)
