"""Choosing the kernel for dense attention: explicitly, and with the reason."""

import logging
from typing import Any

import jax
import jax.numpy as jnp

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.glm.attend import CausalBackend
from dhisparse_jax.models.train.config import TrainConfig

log = logging.getLogger(__name__)


def choose_backend(config: TrainConfig) -> CausalBackend:
    """The kernel that `config.attention` asks for.

    "auto" takes cuDNN where it is known to work, and says why when it takes XLA.

    Raises:
        UserError: cuDNN was asked for, and cannot be used.
    """
    if config.attention == "xla":
        return "xla"
    reason = _why_not_cudnn(config.model, jnp.dtype(config.compute_dtype))
    if reason is None:
        return "cudnn"
    if config.attention == "cudnn":
        raise UserError(f"cuDNN attention cannot be used: {reason}")
    log.info("dense attention: xla, because %s", reason)
    return "xla"


def _why_not_cudnn(model: GlmConfig, dtype: Any) -> str | None:  # noqa: ANN401  # any dtype
    """None if a small problem compiles, forward and backward."""
    if jax.default_backend() != "gpu":
        return f"the backend is {jax.default_backend()}"
    if dtype == jnp.float32:
        return "cuDNN needs half precision"
    if model.qk_dim != model.v_dim:
        return f"query heads are {model.qk_dim} wide and value heads {model.v_dim}"
    shape = jax.ShapeDtypeStruct((1, 256, model.num_heads, model.qk_dim), dtype)

    def loss(x: jax.Array) -> jax.Array:
        out = jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="cudnn")
        return jnp.sum(out.astype(jnp.float32))

    try:
        jax.jit(jax.grad(loss)).lower(shape).compile()
    except (RuntimeError, ValueError) as error:
        return f"a probe failed: {str(error).splitlines()[0]}"
    return None
