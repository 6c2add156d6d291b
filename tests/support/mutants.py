"""Rules of acceptance that are wrong: a check of the rule must notice each."""

import dataclasses

import jax.numpy as jnp

from dhisparse_jax.speculation.accept import remainder, standing


def own_row(target, proposal, live, accepted):
    """Mutated: a fallen proposal is replaced by a draw from p, not from what q leaves over."""
    return target[accepted]


def soft_as_hard(target, proposal, live, chance):
    """Mutated: stands with probability p, as if every q were one-hot."""
    certain = dataclasses.replace(proposal, probabilities=jnp.ones_like(proposal.probabilities))
    return standing(target, certain, live, chance)


def always(target, proposal, live, chance):
    """Mutated: every possible proposal stands."""
    return standing(target, proposal, live, jnp.zeros_like(chance))


def best_after_all(target, proposal, live, accepted):
    """Mutated: after a block that stood whole comes the best token, instead of a draw from p."""
    rest = remainder(target, proposal, live, accepted)
    best = (jnp.arange(rest.shape[0]) == jnp.argmax(rest)).astype(rest.dtype)
    return jnp.where(accepted == proposal.tokens.shape[0], best, rest)


def one_chance(target, proposal, live, chance):
    """Mutated: one uniform number decides about all proposals of a block."""
    return standing(target, proposal, live, jnp.broadcast_to(chance[:1], chance.shape))
