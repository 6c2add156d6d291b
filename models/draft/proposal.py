"""From the rows of a block to proposed tokens and the distributions they were drawn from.

DFlash takes each row's best token by itself, so its q is one-hot. DFlash2 walks through sixteen
candidates per row by their pair scores. DSpark draws one token after the other from logits that
know the token before. A greedy request takes the best everywhere, and its q is one-hot.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from dhisparse_jax.models.draft.backbone import DraftModel
from dhisparse_jax.models.draft.config import DraftConfig
from dhisparse_jax.models.draft.dflash2 import bound_logits, take_candidates
from dhisparse_jax.models.draft.dspark import ConfidenceHead, MarkovHead
from dhisparse_jax.sampling import Sampler, draw, proposal_keys
from dhisparse_jax.speculation.protocol import Proposal

Pick = Callable[[Float[Array, "R M"], int], tuple[Int[Array, " R"], Float[Array, "R M"]]]
"""From scores and the number of the proposal: the chosen index, and q."""


def picker(sampler: Sampler, length: Int[Array, " R"]) -> Pick:
    """How each request chooses its proposals.

    q is the softmax of the very float32 scores that the draw uses; top-k and top-p are left to the
    target's side, since any q is exact.

    Args:
        sampler: how each request samples.
        length: int32 committed positions; proposal i is for position `length + 1 + i`.
    """
    sampled = sampler.temperature > 0.0

    def pick(scores: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
        best = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        certain = jax.nn.one_hot(best, scores.shape[-1], dtype=jnp.float32)

        def drawn() -> tuple[jax.Array, jax.Array]:
            heat = jnp.where(sampled, sampler.temperature, 1.0)
            scaled = scores / heat[:, None]
            token = draw(scaled, proposal_keys(sampler, length, number))
            q = jax.nn.softmax(scaled, axis=-1)
            return jnp.where(sampled, token, best), jnp.where(sampled[:, None], q, certain)

        # A greedy batch pays for no noise.
        return lax.cond(jnp.any(sampled), drawn, lambda: (best, certain))

    return pick


def propose(
    model: DraftModel,
    config: DraftConfig,
    hidden: Float[Array, "R N d"],
    raw: Float[Array, "R N vocab"],
    anchor: Int[Array, " R"],
    pick: Pick,
) -> Proposal:
    """The proposals of one block per request.

    Args:
        model: the draft, for its heads.
        config: its sizes.
        hidden: proposing rows after the last norm.
        raw: float32 logits of the target's head on them.
        anchor: int32 token before the first proposal.
        pick: from `picker`.
    """
    match config.kind:
        case "dflash":
            return _best_of_rows(raw)
        case "dflash2":
            return _walk_candidates(model, config, hidden, raw, anchor, pick)
        case "dspark":
            assert model.markov_head is not None
            heads = model.markov_head, model.confidence_head
            return walk_markov(*heads, hidden, bound_logits(raw, config), anchor, pick)


def _best_of_rows(raw: Float[Array, "R N vocab"]) -> Proposal:
    """Each row's best token: sampling rows apart from each other is far from a joint draw."""
    tokens = jnp.argmax(raw, axis=-1).astype(jnp.int32)
    ones = jnp.ones(tokens.shape, jnp.float32)
    return Proposal(
        tokens=tokens,
        candidates=tokens[..., None],
        probabilities=ones[..., None],
        confidence=ones,
    )


def _walk_candidates(
    model: DraftModel,
    config: DraftConfig,
    hidden: jax.Array,
    raw: jax.Array,
    anchor: jax.Array,
    pick: Pick,
) -> Proposal:
    """All pair scores at once; only the choice of indices goes row by row."""
    assert model.candidate_selector is not None and config.selector is not None
    ids, unary = take_candidates(raw, config, config.selector)
    first = jnp.broadcast_to(anchor[:, None, None], (ids.shape[0], 1, ids.shape[2]))
    previous = jnp.concatenate((first, ids[:, :-1]), axis=1)
    scores = unary[:, :, None] + model.candidate_selector.pair_scores(hidden, previous, ids)
    index = jnp.zeros_like(anchor)
    tokens: list[jax.Array] = []
    distributions: list[jax.Array] = []
    for number in range(ids.shape[1]):
        row = jnp.take_along_axis(scores[:, number], index[:, None, None], axis=1)[:, 0]
        index, q = pick(row, number)
        tokens.append(jnp.take_along_axis(ids[:, number], index[:, None], axis=1)[:, 0])
        distributions.append(q)
    return Proposal(
        tokens=jnp.stack(tokens, axis=1),
        candidates=ids,
        probabilities=jnp.stack(distributions, axis=1),
        confidence=jnp.ones(ids.shape[:2], jnp.float32),
    )


def walk_markov(
    head: MarkovHead,
    confidence: ConfidenceHead | None,
    hidden: Float[Array, "R N d"],
    unary: Float[Array, "R N vocab"],
    anchor: Int[Array, " R"],
    pick: Pick,
) -> Proposal:
    """One token after the other; the confidence of a row knows the tokens before it only.

    Args:
        head: for the logits of a row, from the token before it.
        confidence: for the chance that it is accepted; None: 1.
        hidden: what both heads read of every row.
        unary: float32 logits of every row without the token before it.
        anchor: int32 token before the first row.
        pick: from `picker`.
    """
    previous, state = anchor, head.start(anchor.shape)
    tokens: list[jax.Array] = []
    distributions: list[jax.Array] = []
    chances: list[jax.Array] = []
    for number in range(unary.shape[1]):
        embedded, row = head.embed(previous), hidden[:, number]
        bias, state = head(state, embedded, row)
        if confidence is not None:
            chances.append(jax.nn.sigmoid(confidence(row, embedded)))
        previous, q = pick(unary[:, number] + bias, number)
        tokens.append(previous)
        distributions.append(q)
    shape = unary.shape[:2]
    every = jnp.arange(unary.shape[2], dtype=jnp.int32)
    return Proposal(
        tokens=jnp.stack(tokens, axis=1),
        candidates=jnp.broadcast_to(every[None, None], unary.shape),
        probabilities=jnp.stack(distributions, axis=1),
        confidence=jnp.stack(chances, axis=1) if chances else jnp.ones(shape, jnp.float32),
    )
