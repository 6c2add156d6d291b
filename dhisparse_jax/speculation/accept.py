"""Accept: which proposals stand, and the token after them. Greedy, or exact rejection sampling.

Query j of a block gives p, the target's distribution of the token at position length + 1 + j, after
every transform that decoding without a draft applies. Proposal i was drawn from q. It stands with
probability min(1, p / q); where one falls, its position gets a token from max(p - q, 0), and all
after it fall with it. The emitted tokens then have the target's distribution whatever q is
(Leviathan et al. 2023, Chen et al. 2023). A query without a proposal has q = 0, so the token after
a block that stood whole is drawn from p by the same rule.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dhisparse_jax.pytree import state as pytree
from dhisparse_jax.sampling import Purpose, Sampler, draw, position_keys, target_logits
from dhisparse_jax.speculation.protocol import Proposal
from pallas_kernels.common.ids import NO_SLOT, dropping, masked


@pytree
class Emitted:
    """What a step adds to every request.

    Attributes:
        tokens: int32 accepted proposals, then one more token; undefined from `count` on.
        count: int32 accepted proposals plus one; 0 where nothing was verified.
    """

    tokens: Int[Array, "R T"]
    count: Int[Array, " R"]


def accept(
    logits: Float[Array, "R T V"],
    proposal: Proposal,
    live: Int[Array, " R"],
    length: Int[Array, " R"],
    sampler: Sampler,
) -> Emitted:
    """Decide about every request's block; T = N + 1.

    Args:
        logits: float32 of the target; query 0 read the anchor, query i + 1 read proposal i.
        proposal: what was proposed.
        live: int32 queries that were verified; proposals from `live - 1` on count as not made.
            Chosen without knowledge of the proposals that it admits (see `schedule`).
        length: int32 committed positions before the step.
        sampler: how each request chooses.

    Examples:
        Of two proposals the target would have chosen the first; then it goes on by itself:

        >>> import jax.numpy as jnp
        >>> from dhisparse_jax import Proposal
        >>> from dhisparse_jax.sampling import greedy
        >>> from dhisparse_jax.speculation.accept import accept
        >>> tokens = jnp.array([[2, 0]])
        >>> proposal = Proposal(
        ...     tokens=tokens,
        ...     candidates=tokens[..., None],
        ...     probabilities=jnp.ones((1, 2, 1)),
        ...     confidence=jnp.ones((1, 2)),
        ... )
        >>> logits = jnp.eye(4)[jnp.array([[2, 3, 1]])]
        >>> live, length = jnp.array([3]), jnp.array([9])
        >>> emitted = accept(logits, proposal, live, length, greedy(1))
        >>> emitted.tokens[0, : emitted.count[0]]
        Array([2, 3], dtype=int32)
    """
    sampled = sampler.temperature > 0.0
    best = lambda: jax.vmap(_greedy)(logits, proposal, live)
    drawn = lambda: _where(
        sampled, jax.vmap(_sampled)(logits, proposal, live, length, sampler), best()
    )
    return lax.cond(jnp.any(sampled), drawn, best)  # a greedy batch pays for no filter


def stop_at(emitted: Emitted, stop: Int[Array, "R M"]) -> tuple[Emitted, Bool[Array, " R"]]:
    """End every block at its first stop token, inclusive.

    Args:
        emitted: what was accepted.
        stop: int32 stop tokens of each request, NO_SLOT fills up.

    Returns:
        The shortened blocks, and whether a stop token was found.
    """
    place = jnp.arange(emitted.tokens.shape[1], dtype=jnp.int32)[None]
    found = (emitted.tokens[:, :, None] == stop[:, None]).any(axis=-1)
    found &= place < emitted.count[:, None]
    stopped = found.any(axis=1)
    count = jnp.where(stopped, jnp.argmax(found, axis=1) + 1, emitted.count)
    return Emitted(tokens=emitted.tokens, count=count), stopped


def _greedy(logits: Float[Array, "T V"], proposal: Proposal, live: Int[Array, ""]) -> Emitted:
    """The longest prefix that the target would have chosen; ties go to the lowest id."""
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    accepted = _prefix(best[:-1] == proposal.tokens, live)
    return Emitted(tokens=best, count=jnp.minimum(accepted + 1, live))


def _sampled(
    logits: Float[Array, "T V"],
    proposal: Proposal,
    live: Int[Array, ""],
    length: Int[Array, ""],
    sampler: Sampler,
) -> Emitted:
    """Exact rejection sampling for one request."""
    queries = logits.shape[0]
    rows = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (queries,)), sampler)
    position = length + 1 + jnp.arange(queries, dtype=jnp.int32)
    target = jax.nn.softmax(target_logits(logits, rows), axis=-1)
    chance = jax.vmap(jax.random.uniform)(position_keys(rows, position, Purpose.ACCEPT))
    accepted = standing(target, proposal, live, chance[:-1])
    after = remainder(target, proposal, live, accepted)
    key = position_keys(rows, position, Purpose.CHOOSE)[accepted]
    final = draw(jnp.log(after)[None], key[None])[0]
    proposed = jnp.pad(proposal.tokens, (0, 1))
    tokens = jnp.where(jnp.arange(queries, dtype=jnp.int32) < accepted, proposed, final)
    return Emitted(tokens=tokens, count=jnp.minimum(accepted + 1, live))


def standing(
    target: Float[Array, "T V"],
    proposal: Proposal,
    live: Int[Array, ""],
    chance: Float[Array, " N"],
) -> Int[Array, ""]:
    """How many proposals of one request stand: each with probability min(1, p / q).

    Args:
        target: float32 probabilities of every query.
        proposal: of one request.
        live: int32 verified queries.
        chance: float32 uniform numbers in [0, 1).
    """
    p = jnp.take_along_axis(target[:-1], proposal.tokens[:, None], axis=1)[:, 0]
    own = proposal.candidates == proposal.tokens[:, None]
    q = jnp.where(own, proposal.probabilities, 0.0).sum(axis=1)
    return _prefix(chance * q < p, live)


def remainder(
    target: Float[Array, "T V"],
    proposal: Proposal,
    live: Int[Array, ""],
    accepted: Int[Array, ""],
) -> Float[Array, " V"]:
    """Distribution of the token after the accepted ones, not normalised: max(p - q, 0)."""
    candidates, probabilities = _verified(proposal, live)
    own = target[accepted]
    at = dropping(candidates[accepted], own.shape[0])
    rest = jnp.maximum(own.at[at].add(-probabilities[accepted], mode="drop"), 0.0)
    # Equal distributions leave nothing over, and reject nothing but by rounding.
    return jnp.where(rest.sum() > 0.0, rest, own)


def _verified(
    proposal: Proposal, live: Int[Array, ""]
) -> tuple[Int[Array, "T M"], Float[Array, "T M"]]:
    """Candidates and q of every query; q = 0 for the last one and where nothing was verified."""
    pad = ((0, 1), (0, 0))
    verified = jnp.arange(proposal.tokens.shape[0] + 1, dtype=jnp.int32) < live - 1
    candidates = jnp.pad(proposal.candidates, pad, constant_values=NO_SLOT)
    probabilities = jnp.pad(proposal.probabilities, pad)
    keep = jnp.broadcast_to(verified[:, None], candidates.shape)
    return masked(candidates, keep), jnp.where(keep, probabilities, 0.0)


def _prefix(stands: Bool[Array, " N"], live: Int[Array, ""]) -> Int[Array, ""]:
    """How many verified proposals stand before the first that does not."""
    verified = jnp.arange(stands.shape[0], dtype=jnp.int32) < live - 1
    return jnp.cumprod(stands & verified, dtype=jnp.int32).sum(dtype=jnp.int32)


def _where(sampled: Bool[Array, " R"], drawn: Emitted, best: Emitted) -> Emitted:
    return Emitted(
        tokens=jnp.where(sampled[:, None], drawn.tokens, best.tokens),
        count=jnp.where(sampled, drawn.count, best.count),
    )
