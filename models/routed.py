"""The routed experts of a layer, whatever chooses them: as floats, or as they are stored."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dhisparse_jax.configs.deepseek_v41 import SinceV4
from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.configs.quantised import FLOAT
from dhisparse_jax.models.experts import Routing, run_experts
from dhisparse_jax.models.glm.linear import residual_init, weight_init
from dhisparse_jax.models.stored_experts import PairActivation, StoredExperts


class RoutedExperts(nnx.Module):
    """Routed experts, stacked; a layer derives from it, which has a router beside them.

    Attributes:
        gate_up: gate columns, then up columns, of every expert.
        down: output matrix of every expert.
        stored: the experts, in place of these two, where they stay quantised.
    """

    def __init__(self, config: GlmConfig | SinceV4, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        width, inner = config.hidden_size, config.expert_intermediate_size
        experts, form = config.num_experts, config.expert_format
        param_dtype = jnp.dtype(config.param_dtype)
        self.num_experts = experts
        self.stored = StoredExperts(experts, width, inner, form) if form != FLOAT else None
        if form == FLOAT:
            init, down_init = weight_init(width), residual_init(inner, config.num_layers)
            self.gate_up = nnx.Param(init(rngs.params(), (experts, width, 2 * inner), param_dtype))
            self.down = nnx.Param(down_init(rngs.params(), (experts, inner, width), param_dtype))
        else:
            self.gate_up = self.down = None
        self.dtype = dtype

    def routed(
        self, x: Float[Array, "*batch width"], routing: Routing, activation: PairActivation
    ) -> Float[Array, "*batch width"]:
        """The weighted sum of the chosen experts' outputs, for normalised inputs `x`."""
        if self.stored is not None:
            return self.stored(x, routing, activation)
        assert self.gate_up is not None  # one of the two forms is there
        assert self.down is not None
        gate_up, down = (part[...].astype(self.dtype) for part in (self.gate_up, self.down))
        split = lambda both: activation(*jnp.split(both, 2, axis=-1))
        return run_experts(x, routing, gate_up, down, split, self.num_experts)
