"""Feed-forward layers: two ways to choose experts, and bounded activations."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dhisparse_jax.configs.deepseek_v4 import V4Sizes
from dhisparse_jax.configs.deepseek_v41 import SinceV4
from dhisparse_jax.models.experts import Routing
from dhisparse_jax.models.glm.linear import exact_dot, linear, residual_init, weight_init
from dhisparse_jax.models.glm.norms import along_last
from dhisparse_jax.models.routed import RoutedExperts


class BoundedMlp(nnx.Module):
    """`down(silu(gate x) * up x)` with bounds on both factors."""

    def __init__(self, config: SinceV4, inner: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        width = config.hidden_size
        args = {"dtype": dtype, "param_dtype": jnp.dtype(config.param_dtype), "rngs": rngs}
        self.gate = linear(width, inner, **args)
        self.up = linear(width, inner, **args)
        down_init = residual_init(inner, config.num_layers)
        self.down = linear(inner, width, kernel_init=down_init, **args)
        self.limit = config.swiglu_limit

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """Residual update for normalised inputs `x`."""
        return self.down(bounded_swiglu(self.gate(x), self.up(x), self.limit))


class V4Router(nnx.Module):
    """Scores `sqrt(softplus(x W))`; who is chosen, the token says or the best biased scores do.

    Attributes:
        kernel: to the scores.
        bias: moves the choice but not the weights; None where the token says.
        by_token: experts of every token id; None where the scores say.
    """

    def __init__(self, config: V4Sizes, *, hashed: bool, rngs: nnx.Rngs) -> None:
        experts, chosen = config.num_experts, config.experts_per_token
        init, shape = weight_init(config.hidden_size), (config.hidden_size, experts)
        self.kernel = nnx.Param(init(rngs.params(), shape, jnp.dtype(config.param_dtype)))
        self.bias = None if hashed else nnx.Param(jnp.zeros((experts,), jnp.float32))
        table = (config.vocab_size, chosen)
        self.by_token = nnx.Param(jnp.zeros(table, jnp.int32)) if hashed else None
        self.chosen, self.scale = chosen, config.routed_scale

    def __call__(self, x: Float[Array, "*batch width"], tokens: Int[Array, "*batch"]) -> Routing:
        """Chooses experts for normalised inputs `x` of these token ids, in float32."""
        scores = jnp.sqrt(jax.nn.softplus(exact_dot(x, self.kernel[...])))
        if self.by_token is not None:
            experts = self.by_token[...][tokens]
        else:
            assert self.bias is not None  # one of the two is there
            bias = along_last(self.bias[...], scores.ndim)
            _, experts = jax.lax.top_k(scores + bias, self.chosen)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return Routing(experts, weights * self.scale)


class V4Moe(RoutedExperts):
    """Routed experts, plus one that every token passes."""

    def __init__(
        self, config: SinceV4, *, dtype: jnp.dtype, rngs: nnx.Rngs, hashed: bool = False
    ) -> None:
        self.router = V4Router(config, hashed=hashed, rngs=rngs)
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.shared = BoundedMlp(config, config.expert_intermediate_size, dtype=dtype, rngs=rngs)
        self.limit = config.swiglu_limit

    def __call__(
        self, x: Float[Array, "*batch width"], tokens: Int[Array, "*batch"]
    ) -> Float[Array, "*batch width"]:
        """Residual update for normalised inputs `x` of these token ids."""
        activation = partial(bounded_swiglu, limit=self.limit)
        return self.routed(x, self.router(x, tokens), activation) + self.shared(x)


def bounded_swiglu(
    gate: Float[Array, "*batch inner"], up: Float[Array, "*batch inner"], limit: float
) -> Float[Array, "*batch inner"]:
    """`silu(gate) * up`, the gate bounded above and the other on both sides."""
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)
