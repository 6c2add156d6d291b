"""One GPU's share of a model: matrices that stay quantised, and some of the routed experts.

A model is cut from its shapes, so nothing of the whole is ever allocated. Projections become
`StoredLinear`, with e4m3 numbers as a checkpoint has them but a float32 scale for each output
channel, which belongs behind the sum. What runs the experts that are here, and on which tokens, is
the caller's: no other GPU is there to ask.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import ml_dtypes
from flax import nnx
from jaxtyping import Array, Float, Int

from dhisparse_jax.models.deepseek_v4.moe import V4Moe
from dhisparse_jax.models.experts import Routing
from dhisparse_jax.models.glm.norms import along_last
from dhisparse_jax.models.stored_experts import StoredExperts, StoredMatrices

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


def scaled_product(
    x: Float[Array, "*batch fan_in"],
    numbers: Float[Array, "fan_out fan_in"],
    scale: Float[Array, " fan_out"],
) -> Float[Array, "*batch fan_out"]:
    """`x` times a matrix with a scale per output channel; sums in float32, in the dtype of `x`."""
    numbers = numbers.astype(x.dtype)
    sums = jnp.einsum("...k,nk->...n", x, numbers, preferred_element_type=jnp.float32)
    return (sums * along_last(scale, x.ndim)).astype(x.dtype)


class StoredLinear(nnx.Module):
    """A projection whose matrix `[out, in]` stays e4m3, times a scale per output channel."""

    def __init__(self, linear: nnx.Linear) -> None:
        fan_in, fan_out = linear.in_features, linear.out_features
        self.numbers = nnx.Param(jnp.zeros((fan_out, fan_in), ml_dtypes.float8_e4m3fn))
        self.scale = nnx.Param(jnp.ones((fan_out,), jnp.float32))
        self.dtype = linear.dtype

    def __call__(self, x: Float[Array, "*batch fan_in"]) -> Float[Array, "*batch fan_out"]:
        """Sums in float32, in the dtype of the projection."""
        return scaled_product(x.astype(self.dtype), self.numbers[...], self.scale[...])


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
