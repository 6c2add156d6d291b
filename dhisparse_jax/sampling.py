"""Choosing the next token: greedy, or sampling with temperature, top-k and top-p.

A draw depends on the seed, the request's number and the position alone, so it does not change with
the batch, the policy or the steps around it.
"""

import dataclasses
import enum
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from dhisparse_jax.errors import UserError
from dhisparse_jax.leading import leading
from dhisparse_jax.pytree import state as pytree
from pallas_kernels.top_k.keys import keys_of

LEAST_TEMPERATURE = 1e-30
"""Logits divided by less than that may be more than float32 has."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one request chooses.

    Attributes:
        temperature: 0 is greedy; else at least `LEAST_TEMPERATURE`.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: then keep the smallest set of most likely tokens whose probability reaches top_p.
        seed: of the request's random draws.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values without a meaning."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise UserError(f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        if 0.0 < self.temperature < LEAST_TEMPERATURE:
            raise UserError(
                f"temperature is {self.temperature}; it must be 0 (greedy) or at least "
                f"{LEAST_TEMPERATURE}, below which logits overflow"
            )
        if self.top_k < 0:
            raise UserError(f"top-k is {self.top_k}; it must be 0 (off) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top-p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed is {self.seed}; it must be in 0..{2**32 - 1}")


@pytree
class Sampler:
    """The sampling of every request row, as arrays, so that no value retraces.

    Attributes:
        temperature: float32, 0 is greedy.
        top_k: int32, 0 keeps all.
        top_p: float32.
        key: one PRNG key per row, derived from the seed and the request's number.
    """

    temperature: Float[Array, " R"]
    top_k: Int[Array, " R"]
    top_p: Float[Array, " R"]
    key: Key[Array, " R"]


def greedy(requests: int) -> Sampler:
    """A sampler whose every row is greedy."""
    return Sampler(
        temperature=jnp.zeros(requests, jnp.float32),
        top_k=jnp.zeros(requests, jnp.int32),
        top_p=jnp.ones(requests, jnp.float32),
        key=jax.random.split(jax.random.key(0), requests),
    )


def sampler_row(sampling: Sampling, number: int) -> Sampler:
    """The sampler of one row, for request `number` of a run."""
    key = jax.random.fold_in(jax.random.key(jnp.uint32(sampling.seed)), jnp.uint32(number))
    return Sampler(
        temperature=jnp.asarray([sampling.temperature], jnp.float32),
        top_k=jnp.asarray([sampling.top_k], jnp.int32),
        top_p=jnp.asarray([sampling.top_p], jnp.float32),
        key=key[None],
    )


class Purpose(enum.IntEnum):
    """What a random draw at a position is for; draws of different purposes are independent.

    Attributes:
        CHOOSE: the token itself, or the one after the accepted proposals.
        PROPOSE: a token that a draft proposes.
        ACCEPT: whether a proposal stands.
    """

    CHOOSE = 0
    PROPOSE = 1
    ACCEPT = 2


def position_keys(
    sampler: Sampler, position: Int[Array, " R"], purpose: Purpose
) -> Key[Array, " R"]:
    """A key for every row's draw at a position.

    A position may be verified in several steps, but only one of them decides its token, so a
    purpose needs one key per position. Proposals have `proposal_keys`.
    """
    # Positions are below 2**31, so the root of another purpose is the key of no position.
    root = lambda key: jax.random.fold_in(key, jnp.uint32(2**32 - purpose)) if purpose else key
    return jax.vmap(lambda key, at: jax.random.fold_in(root(key), at))(sampler.key, position)


def proposal_keys(sampler: Sampler, length: Int[Array, " R"], number: int) -> Key[Array, " R"]:
    """A key for every row's draw of a proposal.

    A position is proposed in several steps, and drawn anew in each: how many proposals a step
    verifies may follow from what earlier steps proposed (`speculation.schedule`), and so must say
    nothing about its own.

    Args:
        sampler: how each row chooses.
        length: int32 committed positions, one number in each step.
        number: of the proposal in its block, from 0.
    """
    keys = position_keys(sampler, length, Purpose.PROPOSE)
    return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)


def target_logits(logits: Float[Array, "R V"], sampler: Sampler) -> Float[Array, "R V"]:
    """Logits of the distribution that a row really samples from; -inf for excluded tokens.

    Temperature first, then top-k, then top-p on what is left. A greedy row is scaled as if its
    temperature were 1 and otherwise treated alike. Ties go to the lowest ids.

    Without a sort: see `leading`. What top-k keeps is exact. Top-p keeps a token while the rounded
    float32 mass of those before it is below top_p, so where both are equal but for the last bits
    of a sum over the vocabulary, a token more or less may stay than by another order of summing.
    """
    heat = jnp.where(sampler.temperature > 0.0, sampler.temperature, 1.0)
    scaled = logits.astype(jnp.float32) / heat[:, None]
    keys, every = keys_of(scaled), logits.shape[-1]
    count = jnp.where(sampler.top_k == 0, every, jnp.minimum(sampler.top_k, every))
    keep = leading(keys, jnp.ones_like(scaled), count.astype(jnp.float32))
    mass = jnp.where(keep, jnp.exp(scaled - scaled.max(axis=-1, keepdims=True)), 0.0)
    # However small the share is, the most likely token stays.
    share = jnp.maximum(sampler.top_p * mass.sum(axis=-1), jnp.finfo(jnp.float32).tiny)
    # Rounded sums reach 1 before the last token: at top_p = 1 they must not exclude any.
    keep &= leading(keys, mass, share) | (sampler.top_p >= 1.0)[:, None]
    return jnp.where(keep, scaled, -jnp.inf)


def choose(
    logits: Float[Array, "R V"], sampler: Sampler, position: Int[Array, " R"]
) -> Int[Array, " R"]:
    """The next token of every row; greedy ties go to the lowest id.

    Args:
        logits: float32.
        sampler: how each row chooses.
        position: int32 position of the token that is chosen.

    Examples:
        >>> import jax.numpy as jnp
        >>> from dhisparse_jax.sampling import Sampling, choose, greedy, sampler_row
        >>> logits = jnp.array([[0.0, 2.0, 1.0, 2.0]])
        >>> choose(logits, greedy(1), jnp.array([7]))
        Array([1], dtype=int32)

        A seed, a request's number and a position have one draw, whatever runs beside it:

        >>> sampler = sampler_row(Sampling(temperature=0.7, top_k=2, seed=1), number=0)
        >>> choose(logits, sampler, jnp.array([7])).tolist() in ([1], [3])
        True
    """
    sampled = sampler.temperature > 0.0
    best = lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn = lambda: jnp.where(sampled, _draw(logits, sampler, position), best())
    return lax.cond(jnp.any(sampled), drawn, best)  # a greedy batch pays for no filter


def _draw(
    logits: Float[Array, "R V"], sampler: Sampler, position: Int[Array, " R"]
) -> Int[Array, " R"]:
    """A draw from every row's target distribution."""
    keys = position_keys(sampler, position, Purpose.CHOOSE)
    return draw(target_logits(logits, sampler), keys)


def draw(logits: Float[Array, "R V"], keys: Key[Array, " R"]) -> Int[Array, " R"]:
    """One token of every row from softmax(logits), float32 (Gumbel-max)."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)
