"""Feed-forward layers: the gated MLP, the router, and the mixture of experts."""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.models.experts import Routing
from dhisparse_jax.models.glm.linear import exact_dot, linear, residual_init, weight_init
from dhisparse_jax.models.glm.norms import along_last
from dhisparse_jax.models.routed import RoutedExperts


@runtime_checkable
class MlpSizes(Protocol):
    """What a gated MLP needs of a configuration."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers of the model, by which the initial weights go."""
        ...

    @property
    def param_dtype(self) -> str:
        """Dtype of the weights."""
        ...


class GatedMlp(nnx.Module):
    """`down(silu(gate x) * up x)`."""

    def __init__(self, config: MlpSizes, inner: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        width = config.hidden_size
        args = {"dtype": dtype, "param_dtype": jnp.dtype(config.param_dtype), "rngs": rngs}
        self.gate = linear(width, inner, **args)
        self.up = linear(width, inner, **args)
        down_init = residual_init(inner, config.num_layers)
        self.down = linear(inner, width, kernel_init=down_init, **args)

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """Residual update for normalised inputs `x`."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Router(nnx.Module):
    """Sigmoid scores with a balancing bias that moves the choice but not the weights."""

    def __init__(self, config: GlmConfig, *, rngs: nnx.Rngs) -> None:
        shape = (config.hidden_size, config.num_experts)
        init = weight_init(config.hidden_size)
        self.kernel = nnx.Param(init(rngs.params(), shape, jnp.dtype(config.param_dtype)))
        self.bias = nnx.Param(jnp.zeros((config.num_experts,), jnp.float32))
        self.num_groups = config.num_expert_groups
        self.kept_groups = config.kept_expert_groups
        self.chosen = config.experts_per_token
        self.normalise = config.normalise_routing
        self.scale = config.routed_scale

    def __call__(self, x: Float[Array, "*batch width"]) -> Routing:
        """Chooses experts for normalised inputs `x`, in float32."""
        scores = jax.nn.sigmoid(exact_dot(x, self.kernel[...]))
        bias = along_last(self.bias[...], scores.ndim)
        _, experts = jax.lax.top_k(self._within_kept_groups(scores + bias), self.chosen)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if self.normalise:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return Routing(experts, weights * self.scale)

    def _within_kept_groups(
        self, choice: Float[Array, "*batch experts"]
    ) -> Float[Array, "*batch experts"]:
        """Rules out experts outside the groups whose two best experts sum highest."""
        if self.num_groups == 1:
            return choice
        grouped = choice.reshape(*choice.shape[:-1], self.num_groups, -1)
        best, _ = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))
        _, kept = jax.lax.top_k(jnp.sum(best, axis=-1), self.kept_groups)
        keep = jnp.any(jax.nn.one_hot(kept, self.num_groups, dtype=jnp.bool_), axis=-2)
        return jnp.where(keep[..., None], grouped, -jnp.inf).reshape(choice.shape)


class MoeMlp(RoutedExperts):
    """Routed experts, plus experts that every token passes."""

    def __init__(self, config: GlmConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.router = Router(config, rngs=rngs)
        super().__init__(config, dtype=dtype, rngs=rngs)
        shared = config.num_shared_experts * config.expert_intermediate_size
        self.shared = GatedMlp(config, shared, dtype=dtype, rngs=rngs) if shared else None

    def __call__(
        self, x: Float[Array, "*batch width"], routing: Routing | None = None
    ) -> Float[Array, "*batch width"]:
        """Residual update for normalised inputs `x`; routes them unless `routing` is given."""
        routing = self.router(x) if routing is None else routing
        routed = self.routed(x, routing, lambda gate, up: jax.nn.silu(gate) * up)
        return routed if self.shared is None else routed + self.shared(x)
