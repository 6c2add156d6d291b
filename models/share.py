"""One GPU's share of a model: matrices that stay quantised, and some of the routed experts.

A model is cut from its shapes, so nothing of the whole is ever allocated. Projections become
`StoredLinear`, with e4m3 numbers as a checkpoint has them but a float32 scale for each output
channel, which belongs behind the sum. Their inputs are rounded to e4m3 too, with a scale per row,
as published fp8 checkpoints say (`activation_scheme: dynamic`). What runs the experts that are
here, and on which tokens, is the caller's: no other GPU is there to ask.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import ml_dtypes
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dhisparse_jax.models.deepseek_v4.moe import V4Moe
from dhisparse_jax.models.experts import Routing
from dhisparse_jax.models.glm.norms import along_last
from dhisparse_jax.models.stored_experts import StoredExperts, StoredMatrices
from dhisparse_jax.pytree import state as pytree
from pallas_kernels.round_rows.api import round_gated, round_rows

Named = Mapping[str, Mapping[str, Any]]
"""Weights by the name of their module, then by their own: `layers.3.attention.q_a`, `numbers`."""


class Stored(Protocol):
    """What the experts that are here are made of: packed numbers and scales of three matrices."""

    gate: StoredMatrices
    up: StoredMatrices
    down: StoredMatrices


RunExperts = Callable[[Stored, Float[Array, "R T D"], Routing, float, int], Float[Array, "R T D"]]
"""(experts here, inputs, who was chosen, bound of the activation, number of the layer) -> outputs.
Of the routing, experts are numbers among all of them."""


@pytree
class Rounded:
    """Rows of 8 bits: `numbers * scales`.

    Attributes:
        numbers: e4m3.
        scales: float32 of every row.
    """

    numbers: Float[Array, "*n width"]
    scales: Float[Array, "*n"]


def rounded(x: Float[Array, "*n width"]) -> Rounded:
    """Rows as products take them; `x` is bfloat16 or float32."""
    numbers, scales = round_rows(x)
    return Rounded(numbers=numbers, scales=scales)


def gated_rounded(
    sums: Float[Array, "*n twice"], rows: Float[Array, "*n"], columns: Float[Array, "*e twice"]
) -> Rounded:
    """`silu(gate) * up` as products take it, of gates and ups that are still to be scaled.

    Args:
        sums: of rows, or of blocks of rows of several matrices, times gates and ups side by side.
        rows: scales of the rows.
        columns: scales of the output channels; several where there are several matrices.
    """
    matrices = columns.reshape(-1, columns.shape[-1])
    blocks = sums.reshape(len(matrices), -1, sums.shape[-1])
    numbers, scales = round_gated(blocks, rows.reshape(blocks.shape[:2]), matrices)
    return Rounded(numbers=numbers.reshape(*rows.shape, -1), scales=scales.reshape(rows.shape))


def scaled_product(
    x: Rounded,
    numbers: Float[Array, "fan_out fan_in"],
    scale: Float[Array, " fan_out"],
    dtype: DTypeLike,
) -> Float[Array, "*n fan_out"]:
    """Rows times an e4m3 matrix with a scale per output channel.

    Sums are added up in float32, and leave the product in `dtype`, before they are scaled: XLA puts
    scales that other kernels made into the kernel that comes next, and not into the product.
    """
    sums = jnp.einsum("...k,nk->...n", x.numbers, numbers, preferred_element_type=dtype)
    return scaled(sums, x.scales[..., None], along_last(scale, sums.ndim))


def scaled(
    sums: Float[Array, "*n out"], rows: Float[Array, "*n 1"], columns: Float[Array, "*one out"]
) -> Float[Array, "*n out"]:
    """Sums of products of scaled numbers, times their scales; in the dtype of the sums."""
    return (sums.astype(jnp.float32) * rows * columns).astype(sums.dtype)


class StoredLinear(nnx.Module):
    """A projection whose matrix `[out, in]` stays e4m3, times a scale per output channel."""

    def __init__(self, linear: nnx.Linear) -> None:
        fan_in, fan_out = linear.in_features, linear.out_features
        self.numbers = nnx.Param(jnp.zeros((fan_out, fan_in), ml_dtypes.float8_e4m3fn))
        self.scale = nnx.Param(jnp.ones((fan_out,), jnp.float32))
        self.dtype = linear.dtype

    def __call__(self, x: Float[Array, "*batch fan_in"]) -> Float[Array, "*batch fan_out"]:
        """Sums in float32, in the dtype of the projection."""
        x = x.astype(self.dtype)
        return scaled_product(rounded(x), self.numbers[...], self.scale[...], x.dtype)


class ExpertShare(nnx.Module):
    """The experts of one layer that are on this GPU, the router of all, and the shared one."""

    def __init__(self, moe: V4Moe, *, held: int, layer: int, run: RunExperts) -> None:
        width, inner = moe.shared.gate.in_features, moe.shared.gate.out_features
        self.router, self.shared = moe.router, moe.shared
        self.stored = StoredExperts(held, width, inner, "fp4")
        self.limit, self.layer, self.run = moe.limit, layer, run

    def __call__(
        self, x: Float[Array, "R T D"], tokens: Int[Array, "R T"]
    ) -> Float[Array, "R T D"]:
        """Residual update for normalised inputs `x` of these token ids."""
        with jax.named_scope("shared"):
            shared = self.shared(x)
        with jax.named_scope("router"):
            routing = self.router(x, tokens)
        with jax.named_scope("experts"):
            return shared + self.run(self.stored, x, routing, self.limit, self.layer)


@dataclasses.dataclass(frozen=True)
class Share:
    """A model that was cut.

    Attributes:
        graph: its structure.
        like: shapes of its weights, as `nnx.split` gives them.
    """

    graph: nnx.GraphDef[Any]
    like: Any = dataclasses.field(compare=False)

    @property
    def shapes(self) -> dict[str, dict[str, Any]]:
        """Shapes of all weights."""
        found: dict[str, dict[str, Any]] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.like):
            module, own = _names(path)
            found.setdefault(module, {})[own] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return found

    def state(self, weights: Named) -> Any:  # noqa: ANN401  # an nnx.State
        """Weights as `nnx.split` gives them; None where there are none."""

        def of(path: tuple[Any, ...], _: Any) -> Any:  # noqa: ANN401
            module, own = _names(path)
            return weights.get(module, {}).get(own)

        return jax.tree_util.tree_map_with_path(of, self.like)

    def model(self, weights: Named) -> Any:  # noqa: ANN401  # the module that was cut
        """The model, with some of its weights."""
        return nnx.merge(self.graph, self.state(weights))


def cut(
    make: Callable[[], nnx.Module], *, kept: tuple[str, ...], held: int, run: RunExperts
) -> Share:
    """One GPU's share of the model that `make` would give.

    Args:
        make: makes it; never run but for its shapes.
        kept: names of projections that stay floats, as the head does.
        held: routed experts of each layer that are here.
        run: runs them.
    """

    def made() -> nnx.Module:
        model, layer = make(), 0
        for _, module in list(nnx.iter_modules(model)):
            for name, part in list(vars(module).items()):
                if isinstance(part, V4Moe):
                    setattr(module, name, ExpertShare(part, held=held, layer=layer, run=run))
                    layer += 1
        for _, module in list(nnx.iter_modules(model)):
            for name, part in list(vars(module).items()):
                if isinstance(part, nnx.Linear) and name not in kept:
                    setattr(module, name, StoredLinear(part))
        return model

    graph, like = nnx.split(nnx.eval_shape(made))
    return Share(graph, like)


def _names(path: tuple[Any, ...]) -> tuple[str, str]:
    """Module and own name of a weight."""
    words = [str(cast(Any, entry).key) for entry in path if hasattr(entry, "key")]
    return ".".join(words[:-1]), words[-1]
