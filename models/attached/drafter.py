"""The drafter as the library's speculation wants it: pure functions over a draft ring.

The ring has as many slots as the window: all that is in it is seen by every row of a block, as in
DeepSeek's own implementation.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dhisparse_jax.configs.attached import AttachedConfig
from dhisparse_jax.configs.deepseek_v41 import SinceV4, V41Config
from dhisparse_jax.geometry import Geometry, RowFormat
from dhisparse_jax.hierarchy.formats import stored_rows
from dhisparse_jax.hierarchy.layout import row_options
from dhisparse_jax.models.attached.model import AttachedModel, Block
from dhisparse_jax.models.deepseek_v4 import decode as v4_decode
from dhisparse_jax.models.deepseek_v4.attention import Projected
from dhisparse_jax.models.deepseek_v4.store import kept_words, with_room
from dhisparse_jax.models.deepseek_v41 import decode as v41_decode
from dhisparse_jax.models.draft.drafter import DrafterParams
from dhisparse_jax.models.draft.proposal import picker, walk_markov
from dhisparse_jax.sampling import Sampler
from dhisparse_jax.speculation.protocol import Proposal
from dhisparse_jax.speculation.ring import Ring, init_ring, reset_row, visible, write
from pallas_kernels.common.ids import masked
from pallas_kernels.sparse_attention.api import sparse_attention


@dataclasses.dataclass(frozen=True)
class AttachedDrafter:
    """An attached DSpark as a `speculation.protocol.Drafter`.

    Attributes:
        config: sizes.
        target: sizes of the target, with the format of its history, in which the ring is kept.
        graph: structure of the NNX model; hashable, so that it can be static under `jit`.
        dtype: of the computation.
        length: tokens proposed per step, at most as many as a block has rows. The block always has
            all its rows, which see each other; the farthest proposals are left out.
    """

    config: AttachedConfig
    target: SinceV4
    graph: nnx.GraphDef[AttachedModel]
    dtype: str
    length: int

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers that it reads."""
        return self.config.taps

    @property
    def window(self) -> int:
        """Newest committed positions that it reads."""
        return self.target.window

    @property
    def estimates_confidence(self) -> bool:
        """Proposals carry a confidence."""
        return True

    @property
    def row(self) -> RowFormat:
        """Format of a row: that of the target's windows."""
        if isinstance(self.target, V41Config):
            return v41_decode.window_format(self.target, self.dtype)
        return v4_decode.row_format(self.target, self.dtype)

    def init(self, requests: int) -> Ring:
        """Empty rings."""
        sizes = (requests, self.config.stages, self.window, 1, kept_words(self.row))
        return init_ring(*sizes, jnp.int32, value_dim=0)

    def propose(
        self,
        params: DrafterParams,
        state: Ring,
        anchor: Int[Array, " R"],
        length: Int[Array, " R"],
        sampler: Sampler,
    ) -> Proposal:
        """See `speculation.protocol.Drafter`. Rows of the block are never written to the ring."""
        model = self._model(params)
        hidden, normed = (
            part[:, : self.length] for part in self.block(params, state, anchor, length)
        )
        head = params["head"].astype(normed.dtype)
        unary = jnp.einsum("rnd,dv->rnv", normed, head, preferred_element_type=jnp.float32)
        pick = picker(sampler, length)
        return walk_markov(model.markov_head, model.confidence_head, hidden, unary, anchor, pick)

    def block(
        self, params: DrafterParams, state: Ring, anchor: Int[Array, " R"], length: Int[Array, " R"]
    ) -> Block:
        """One block per request, over its ring."""
        rows = jnp.arange(self.config.block_size, dtype=jnp.int32).reshape(1, -1)
        tokens = jnp.where(rows == 0, anchor[:, None], self.config.noise_token_id)
        positions = length[:, None] + rows
        location = _locations(visible(state, positions, None)[1])

        def attend(stage: int, projected: Projected) -> Float[Array, "R B heads head"]:
            fresh = self._stored(projected.row)
            both = jnp.concatenate((state.keys[:, stage, :, 0], fresh), axis=1)
            slots = both.reshape(-1, both.shape[-1])
            options = row_options(self._geometry, 0)
            sinks = model.stages[stage].attention.sinks[...]
            return sparse_attention(projected.query, slots, location, sinks, **options)[0]

        model = self._model(params)
        embedded = params["embedding"][tokens]
        return model.block(embedded, positions, tokens, attend)

    def commit(
        self,
        params: DrafterParams,
        state: Ring,
        features: Float[Array, "R X taps"],
        start: Int[Array, " R"],
        count: Int[Array, " R"],
    ) -> Ring:
        """See `speculation.protocol.Drafter`."""
        ahead = jnp.arange(features.shape[1], dtype=jnp.int32).reshape(1, -1)
        rows = self._model(params).rows(features, start[:, None] + ahead)
        keys = self._stored(rows)[:, :, :, None]
        return write(state, keys, keys[..., :0], start, count)

    def reset(self, state: Ring, row: Int[Array, ""]) -> Ring:
        """See `speculation.protocol.Drafter`."""
        return reset_row(state, row)

    def _stored(self, rows: Float[Array, "*n head"]) -> Int[Array, "*n words"]:
        """Rows as the ring has them."""
        return with_room(stored_rows(self.row, rows), kept_words(self.row))

    @property
    def _geometry(self) -> Geometry:
        """Of a history with one window, for attention."""
        scale = self.target.attention_scale
        return Geometry(row=self.row, layers_per_pool=(1,), top_k=1, scale=scale)

    def _model(self, params: DrafterParams) -> AttachedModel:
        return nnx.merge(self.graph, params["draft"])


def _locations(seen: Bool[Array, "R B C"]) -> Int[Array, "R B N"]:
    """What rows of a block see of the rings, and their whole block behind it; NO_SLOT: nothing."""
    requests, rows, _ = seen.shape
    both = jnp.concatenate((seen, jnp.ones((requests, rows, rows), jnp.bool_)), axis=-1)
    place = jnp.arange(requests * both.shape[2], dtype=jnp.int32).reshape(requests, 1, -1)
    return masked(jnp.broadcast_to(place, both.shape), both)


def drafter_of(
    model: AttachedModel,
    config: AttachedConfig,
    target: SinceV4,
    shared: tuple[jax.Array, jax.Array],
    *,
    length: int | None = None,
) -> tuple[AttachedDrafter, DrafterParams]:
    """Splits a drafter into what is static, and its weights.

    Args:
        model: the drafter.
        config: its sizes.
        target: sizes of the target, as it is served.
        shared: embedding `[vocab, d]` and head `[d, vocab]` of the target.
        length: tokens to propose per step; None: as many as it can.
    """
    graph, state = nnx.split(model)
    drafter = AttachedDrafter(
        config=config,
        target=target,
        graph=graph,
        dtype=model.dtype.name,
        length=config.block_size if length is None else length,
    )
    draft: Any = state
    return drafter, DrafterParams(draft=draft, embedding=shared[0], head=shared[1])
