"""What DSpark adds: logits that know the token before, and an estimate of acceptance."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import normal
from jaxtyping import Array, Float, Int

from dhisparse_jax.models.draft.config import MarkovConfig
from dhisparse_jax.models.glm.linear import linear


class Table(nnx.Module):
    """One row of weights per token."""

    def __init__(self, rows: int, width: int, *, param_dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(normal(0.02)(rngs.params(), (rows, width), param_dtype))

    def __call__(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch width"]:
        """The rows of `tokens`."""
        return self.weight[...][tokens]


class MarkovHead(nnx.Module):
    """A bias on the logits of a row, from the token before it.

    Attributes:
        markov_w1: Embedding of the token before.
        markov_w2: That embedding, gated or not, to a bias on every token's logit; starts at zero.
        gate_proj: Of kind "gated": row and embedding to a gate on the embedding.
        joint_proj: Of kind "rnn": state, embedding and row to gate, update and output.
    """

    def __init__(
        self,
        markov: MarkovConfig,
        vocabulary: int,
        width: int,
        *,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        rank = markov.rank
        args = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.markov_w1 = Table(vocabulary, rank, param_dtype=param_dtype, rngs=rngs)
        self.markov_w2 = linear(rank, vocabulary, kernel_init=nnx.initializers.zeros_init(), **args)
        gated, rnn = markov.kind == "gated", markov.kind == "rnn"
        self.gate_proj = linear(width + rank, rank, bias=True, **args) if gated else None
        self.joint_proj = linear(2 * rank + width, 3 * rank, bias=True, **args) if rnn else None
        self.rank = rank
        self.dtype = dtype

    def embed(self, previous: Int[Array, "*batch"]) -> Float[Array, "*batch rank"]:
        """Embedding of the token before, in the compute dtype."""
        return self.markov_w1(previous).astype(self.dtype)

    def start(self, batch: tuple[int, ...]) -> Float[Array, "*batch rank"]:
        """The recurrent state before the first row."""
        return jnp.zeros((*batch, self.rank), self.dtype)

    def __call__(
        self,
        state: Float[Array, "*batch rank"],
        embedded: Float[Array, "*batch rank"],
        hidden: Float[Array, "*batch d"],
    ) -> tuple[Float[Array, "*batch vocab"], Float[Array, "*batch rank"]]:
        """Float32 bias of one row, and the state for the next; only "rnn" has one."""
        if self.gate_proj is not None:
            gate = jax.nn.sigmoid(self.gate_proj(jnp.concatenate((hidden, embedded), axis=-1)))
            embedded = gate * embedded
        elif self.joint_proj is not None:
            joint = self.joint_proj(jnp.concatenate((state, embedded, hidden), axis=-1))
            keep, update, output = jnp.split(joint, 3, axis=-1)
            keep = jax.nn.sigmoid(keep)
            state = keep * state + (1 - keep) * jnp.tanh(update)
            embedded = jnp.tanh(output)
        return self.markov_w2(embedded).astype(jnp.float32), state


class ConfidenceHead(nnx.Module):
    """The chance that a row's proposal is accepted, given that those before it were."""

    def __init__(
        self,
        markov: MarkovConfig,
        width: int,
        *,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
        bias: bool = True,
    ) -> None:
        self.with_markov = markov.confidence_with_markov
        fan_in = width + (markov.rank if self.with_markov else 0)
        args = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.proj = linear(fan_in, 1, bias=bias, **args)

    def __call__(
        self, hidden: Float[Array, "*batch d"], embedded: Float[Array, "*batch rank"]
    ) -> Float[Array, "*batch"]:
        """Float32 logit of that chance; `embedded` is the raw embedding of the token before."""
        x = jnp.concatenate((hidden, embedded), axis=-1) if self.with_markov else hidden
        return self.proj(x)[..., 0].astype(jnp.float32)


class Corrected(NamedTuple):
    """Logits of every row given the token before it, and the logits of the confidence."""

    logits: Float[Array, "*batch t vocab"]
    confidence: Float[Array, "*batch t"]


def teacher_forced(
    head: MarkovHead,
    confidence: ConfidenceHead | None,
    unary: Float[Array, "*batch t vocab"],
    hidden: Float[Array, "*batch t d"],
    previous: Int[Array, "*batch t"],
) -> Corrected:
    """The heads on known predecessors; rows run one after the other, for the recurrent kind."""
    embedded = head.embed(previous)
    state = head.start(unary.shape[:-2])
    rows = []
    for row in range(unary.shape[-2]):
        bias, state = head(state, embedded[..., row, :], hidden[..., row, :])
        rows.append(unary[..., row, :] + bias)
    sure = jnp.full(previous.shape, jnp.inf, jnp.float32)
    return Corrected(
        jnp.stack(rows, axis=-2), sure if confidence is None else confidence(hidden, embedded)
    )
