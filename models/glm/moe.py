"""Feed-forward layers: the gated MLP, the router, and the mixture of experts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.models.glm.linear import exact_dot, linear, residual_init, weight_init

# Up to this many experts, all of them run on every token. On two CPU cores (8 experts, top 2,
# width 256, inner 96) that takes 0.2 ms for 4 tokens and 3.6 ms for 512, against 0.4 and 7.8 ms
# with `ragged_dot`: without a grouped matmul in the backend, XLA expands `ragged_dot` to one
# masked product per expert over the sorted copies, which is `experts_per_token` times more.
_MAX_EXPERTS_ALL_RUN = 16


class GatedMlp(nnx.Module):
    """`down(silu(gate x) * up x)`."""

    def __init__(self, config: GlmConfig, inner: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        width = config.hidden_size
        args = {"dtype": dtype, "param_dtype": jnp.dtype(config.param_dtype), "rngs": rngs}
        self.gate = linear(width, inner, **args)
        self.up = linear(width, inner, **args)
        down_init = residual_init(inner, config.num_layers)
        self.down = linear(inner, width, kernel_init=down_init, **args)

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """Residual update for normalised inputs `x`."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Routing(NamedTuple):
    """Where each token goes: expert numbers, and float32 weights of their outputs."""

    experts: Int[Array, "*batch chosen"]
    weights: Float[Array, "*batch chosen"]


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
        bias = self.bias[...].reshape((1,) * (scores.ndim - 1) + (-1,))
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


class MoeMlp(nnx.Module):
    """Routed experts, stacked, plus experts that every token passes.

    Attributes:
        gate_up: Gate columns, then up columns, of every expert.
        down: Output matrix of every expert.
    """

    def __init__(self, config: GlmConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        width, inner, experts = (
            config.hidden_size,
            config.expert_intermediate_size,
            config.num_experts,
        )
        param_dtype = jnp.dtype(config.param_dtype)
        self.router = Router(config, rngs=rngs)
        self.gate_up = nnx.Param(
            weight_init(width)(rngs.params(), (experts, width, 2 * inner), param_dtype)
        )
        down_init = residual_init(inner, config.num_layers)
        self.down = nnx.Param(down_init(rngs.params(), (experts, inner, width), param_dtype))
        shared = config.num_shared_experts * inner
        self.shared = GatedMlp(config, shared, dtype=dtype, rngs=rngs) if shared else None
        self.dtype = dtype

    def __call__(
        self, x: Float[Array, "*batch width"], routing: Routing | None = None
    ) -> Float[Array, "*batch width"]:
        """Residual update for normalised inputs `x`; routes them unless `routing` is given."""
        routing = self.router(x) if routing is None else routing
        tokens = x.reshape(-1, x.shape[-1])
        flat = Routing(*(part.reshape(tokens.shape[0], -1) for part in routing))
        few = self.down.shape[0] <= _MAX_EXPERTS_ALL_RUN
        routed = self._run_all(tokens, flat) if few else self._run_sorted(tokens, flat)
        routed = routed.reshape(x.shape)
        return routed if self.shared is None else routed + self.shared(x)

    def _run_all(
        self, x: Float[Array, "tokens width"], routing: Routing
    ) -> Float[Array, "tokens width"]:
        """Every expert on every token, as one wide MLP; unchosen experts get weight zero."""
        picks = jax.nn.one_hot(routing.experts, self.down.shape[0], dtype=jnp.float32)
        weights = jnp.sum(picks * routing.weights[..., None], axis=1).astype(self.dtype)
        wide = jnp.einsum("nd,edf->nef", x, self.gate_up[...].astype(self.dtype))
        hidden = _gate(wide) * weights[..., None]
        return jnp.einsum("nef,efd->nd", hidden, self.down[...].astype(self.dtype))

    def _run_sorted(
        self, x: Float[Array, "tokens width"], routing: Routing
    ) -> Float[Array, "tokens width"]:
        """Copies of the tokens sorted by expert, one contiguous block per expert."""
        count, chosen = routing.experts.shape
        experts = routing.experts.reshape(-1)
        order = jnp.argsort(experts, stable=True)
        sizes = jnp.bincount(experts, length=self.down.shape[0]).astype(jnp.int32)
        gate_up, down = self.gate_up[...].astype(self.dtype), self.down[...].astype(self.dtype)
        hidden = _gate(jax.lax.ragged_dot(x[order // chosen], gate_up, sizes))
        outputs = jax.lax.ragged_dot(hidden, down, sizes)
        outputs = outputs[jnp.argsort(order)].reshape(count, chosen, -1)
        return jnp.einsum("nkd,nk->nd", outputs, routing.weights.astype(self.dtype))


def _gate(gate_up: Float[Array, "*batch twice"]) -> Float[Array, "*batch inner"]:
    """`silu(gate) * up` of concatenated halves."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up
