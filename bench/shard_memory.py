"""Device memory of a cell: what is in it, and how large it may be."""

import dataclasses
import math
from typing import Any

import jax

from bench.shard_cells import Cell
from bench.shard_setup import Setup
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.glm import memory
from dhisparse_jax.models.glm.memory import Account, Fit, fit


def account(setup: Setup, cell: Cell) -> Account:
    """What a cell has in memory."""
    model, drafter = setup.model, setup.drafter
    draft = tree_bytes(setup.draft_params.inner["draft"]) if drafter.length else 0
    cfg = setup.config(cell)
    held = memory.account(model.weight_bytes(), model.config.vocab_size, cfg, drafter, draft)
    workspace = held.bytes["workspace"] + model.scores_bytes(cfg)
    replayed = tree_bytes(setup.params.replay)
    return held._replace(bytes={**held.bytes, "workspace": workspace, "replayed": replayed})


def fitted(setup: Setup, cell: Cell, limit: float) -> Cell:
    """The cell with as many of its requests, and hot slots, as fit into so many bytes.

    Raises:
        UserError: not even one does.
    """
    held = lambda fit: dataclasses.replace(cell, requests=fit.requests, hot_rows=fit.hot_rows)
    fits = lambda fit: account(setup, held(fit)).device_bytes <= limit
    top_k = setup.model.config.index_top_k
    queries = setup.drafter.length + 1
    found = fit(cell.policy, cell.requests, setup.capacity, top_k, queries, fits)
    if not found.requests:
        least = account(setup, held(Fit(1, found.hot_rows))).device_bytes
        raise UserError(
            f"{cell.name} needs {least / 1e9:.1f} GB of device memory for one request, of "
            f"{limit / 1e9:.1f}; lower --context, or --layers"
        )
    return held(found)


def tree_bytes(tree: Any) -> int:  # noqa: ANN401  # any pytree
    """Bytes of all its arrays, or shapes of arrays."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
