"""What DFlash2 adds: dynamic convolutions around the sublayers, and the candidate selector."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import normal
from jaxtyping import Array, Float, Int

from dhisparse_jax.models.draft.config import DraftConfig, SelectorConfig
from dhisparse_jax.models.glm.linear import linear


class DynamicConv(nnx.Module):
    """A short convolution along the rows of a block, with a part of its kernel made from the input.

    One kernel is applied before a sublayer and one after it; both are made from what enters the
    first. Starts as the identity.

    Attributes:
        base_kernel: Constant part, for (before, after), tap and channel.
        kernel_projection: Input to the other part, for (before, after), tap and channel group.
    """

    def __init__(self, config: DraftConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        assert config.selector is not None
        param_dtype = jnp.dtype(config.param_dtype)
        taps, groups = config.selector.conv_taps, config.hidden_size // config.selector.conv_group
        identity = jnp.zeros((2, taps, config.hidden_size), param_dtype).at[:, 0].set(1)
        self.base_kernel = nnx.Param(identity)
        self.kernel_projection = linear(
            config.hidden_size,
            2 * taps * groups,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=nnx.initializers.zeros_init(),
            rngs=rngs,
        )
        self.group = config.selector.conv_group
        self.dtype = dtype

    def kernels(
        self, x: Float[Array, "*batch t d"]
    ) -> tuple[Float[Array, "*batch t taps d"], Float[Array, "*batch t taps d"]]:
        """The kernels before and after the sublayer, for normalised inputs `x`."""
        base = self.base_kernel[...].astype(self.dtype)
        dynamic = self.kernel_projection(x).reshape(*x.shape[:-1], 2, base.shape[1], -1)
        dynamic = jnp.repeat(dynamic, self.group, axis=-1)
        kernels = base.reshape((1,) * (x.ndim - 1) + base.shape) + dynamic
        return kernels[..., 0, :, :], kernels[..., 1, :, :]


def convolve(
    kernels: Float[Array, "*batch t taps d"], x: Float[Array, "*batch t d"]
) -> Float[Array, "*batch t d"]:
    """Row t becomes the sum over taps o of `kernels[t, o] * x[t - o]`; nothing is before row 0."""
    total = kernels[..., 0, :] * x
    for back in range(1, kernels.shape[-2]):
        before = [(0, 0)] * (x.ndim - 2) + [(back, 0), (0, 0)]
        total = total + kernels[..., back, :] * jnp.pad(x, before)[..., : x.shape[-2], :]
    return total


class CandidateSelector(nnx.Module):
    """Scores of neighbouring candidates, by the codes of the earlier and of the later token.

    Attributes:
        predecessor_codebook: Code of each token as the earlier one of a pair.
        successor_codebook: Code of each token as the later one; starts at zero, so that a fresh
            selector changes nothing.
        hidden_projection: Row to a factor on the predecessor's code.
    """

    def __init__(self, config: DraftConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        assert config.selector is not None
        param_dtype = jnp.dtype(config.param_dtype)
        shape = (config.vocab_size, config.selector.rank)
        self.predecessor_codebook = nnx.Param(normal(0.02)(rngs.params(), shape, param_dtype))
        self.successor_codebook = nnx.Param(jnp.zeros(shape, param_dtype))
        self.hidden_projection = linear(
            config.hidden_size, shape[1], dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )

    def pair_scores(
        self,
        hidden: Float[Array, "*batch d"],
        previous: Int[Array, "*batch P"],
        candidates: Int[Array, "*batch M"],
    ) -> Float[Array, "*batch P M"]:
        """Float32 `<predecessor[a] * (projection h), successor[b]>` for every pair (a, b)."""
        earlier = self.predecessor_codebook[...][previous].astype(jnp.float32)
        later = self.successor_codebook[...][candidates].astype(jnp.float32)
        factor = self.hidden_projection(hidden).astype(jnp.float32)
        return jnp.einsum(
            "...pr,...mr->...pm",
            earlier * factor[..., None, :],
            later,
            precision=jax.lax.Precision.HIGHEST,
        )


class Candidates(NamedTuple):
    """The best tokens of each row by the target's head alone, best first.

    Attributes:
        ids: Token ids.
        scores: Float32 logits, after multiplier and bound.
    """

    ids: Int[Array, "*batch M"]
    scores: Float[Array, "*batch M"]


def take_candidates(
    raw: Float[Array, "*batch vocab"], config: DraftConfig, selector: SelectorConfig
) -> Candidates:
    """The top of the raw logits: the bound on logits may tie what they still tell apart."""
    scores, ids = jax.lax.top_k(raw, selector.top_k)
    return Candidates(ids.astype(jnp.int32), bound_logits(scores, config))


def bound_logits(raw: Float[Array, "*batch n"], config: DraftConfig) -> Float[Array, "*batch n"]:
    """Multiplier and soft bound of the target's logits, float32."""
    logits = raw.astype(jnp.float32) * config.output_multiplier
    cap = config.logit_softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap)
