"""The jitted functions of one engine. Each is traced once; lengths, budgets and load are arrays."""

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Float, Int

from dhisparse_jax import prefill
from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy import requests
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.model import Params, ServedModel
from dhisparse_jax.sampling import Sampler, choose, with_row
from dhisparse_jax.step import decode_step, finish_step, forward

if TYPE_CHECKING:
    from dhisparse_jax.prefill import OpenPrompt, Prompt


class Compiled:
    """Functions of (params, state, ...), with model and configuration bound and states donated.

    Args:
        model: the served model.
        cfg: sizes of the hierarchy.
        chunk: prompt tokens per prefill call.
    """

    def __init__(self, model: ServedModel, cfg: HierarchyConfig, chunk: int) -> None:
        self.chunk = chunk
        self.step = jax.jit(partial(decode_step, model, cfg), donate_argnums=1)
        self.forward = jax.jit(partial(forward, model, cfg), donate_argnums=1)
        self.finish = jax.jit(lambda state, n: finish_step(state, cfg, n), donate_argnums=0)
        self.embed = jax.jit(lambda params, tokens: model.embed(params, tokens[None])[0])
        self.logits = jax.jit(partial(_logits, model, chunk))
        self.prefill = jax.jit(
            partial(_prefill_chunk, model, cfg, chunk), static_argnums=1, donate_argnums=(2, 3)
        )
        self.empty_prompt = jax.jit(
            lambda pool: prefill.empty_prompt(cfg, pool, chunk),
            static_argnums=0,
            out_shardings=SingleDeviceSharding(jax.devices()[0]),  # committed, see Engine
        )
        self.join = jax.jit(
            lambda state, row, length: requests.join(state, cfg, row, length), donate_argnums=0
        )
        self.leave = jax.jit(lambda state, row: requests.leave(state, cfg, row), donate_argnums=0)
        self.admit = jax.jit(partial(_admit, cfg), static_argnums=1, donate_argnums=0)
        self.first_token = jax.jit(partial(_first_token, model))
        # A function of its own: jit caches by function, so engines would share and count one.
        self.set_sampler = jax.jit(lambda *args: with_row(*args), donate_argnums=0)

    def traces(self) -> int:
        """How many programs the jitted functions hold: constant after warm-up."""
        return sum(f._cache_size() for f in vars(self).values() if hasattr(f, "_cache_size"))


def _logits(
    model: ServedModel, chunk: int, params: Params, hidden: Float[Array, "P D"], at: Int[Array, ""]
) -> Float[Array, "chunk V"]:
    """Logits of the `chunk` positions from `at` on."""
    piece = lax.dynamic_slice_in_dim(hidden, at, chunk)
    return model.logits(params, piece[None])[0]


def _first_token(
    model: ServedModel,
    params: Params,
    hidden: Float[Array, "P D"],
    length: Int[Array, ""],
    sampler: Sampler,
    row: Int[Array, ""],
) -> Int[Array, ""]:
    """The token after a prompt of `length` tokens, chosen as request row `row` chooses."""
    logits = model.logits(params, hidden[length - 1][None, None])[0]
    mine = jax.tree.map(lambda leaf: leaf[row][None], sampler)
    return choose(logits, mine, length[None])[0]


def _admit(
    cfg: HierarchyConfig, state: HierarchyState, pool: int, row: Int[Array, ""], prompt: "Prompt"
) -> HierarchyState:
    records, keys = prompt.records[: cfg.capacity], prompt.keys[: cfg.capacity]
    return requests.admit_prompt(state, cfg, pool, row, records, keys)


def _prefill_chunk(
    model: ServedModel,
    cfg: HierarchyConfig,
    chunk: int,
    params: Params,
    pool: int,
    hidden: Float[Array, "P D"],
    prompt: "Prompt",
    start: Int[Array, ""],
) -> tuple[Float[Array, "P D"], "Prompt"]:
    """One chunk of a prompt through one group; `hidden` is updated in place."""

    def attend_it(
        opened: "OpenPrompt",
        layer: int,
        row: Float[Array, "1 T width"],
        query: Float[Array, "1 T H width"],
    ) -> tuple[Float[Array, "1 T H value"], "OpenPrompt"]:
        return prefill.attend_prompt(opened, cfg, layer, row, query)

    x = lax.dynamic_slice_in_dim(hidden, start, chunk)[None]
    positions = start + jnp.arange(chunk, dtype=jnp.int32)[None]
    open_it = partial(prefill.open_prompt, prompt, cfg, start)
    x, opened = model.run_group(params, pool, x, positions, open_it, attend_it)
    return lax.dynamic_update_slice_in_dim(hidden, x[0], start, axis=0), opened.prompt
