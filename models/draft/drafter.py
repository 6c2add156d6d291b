"""A draft model as the library's speculation wants it: pure functions over a draft ring."""

import dataclasses
from functools import partial
from typing import Any, TypedDict

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dhisparse_jax.models.draft.backbone import Attend, DraftModel
from dhisparse_jax.models.draft.block import (
    Rows,
    Vocabulary,
    block_positions,
    block_seen,
    embed_rows,
    propose_rows,
)
from dhisparse_jax.models.draft.config import DraftConfig
from dhisparse_jax.models.draft.proposal import picker, propose
from dhisparse_jax.sampling import Sampler
from dhisparse_jax.speculation.protocol import Proposal
from dhisparse_jax.speculation.ring import (
    Ring,
    init_ring,
    newest_seen,
    reset_row,
    ring_capacity,
    write,
)
from pallas_kernels.draft_attention.api import draft_attention
from pallas_kernels.draft_attention.types import KeysValues, RingSeen


class DrafterParams(TypedDict):
    """Weights of a drafter.

    Attributes:
        draft: of the draft model, as `nnx.split` gives them.
        embedding: of the target, or the draft's own.
        head: of the target, or the draft's own.
    """

    draft: Any
    embedding: Float[Array, "vocab d"]
    head: Float[Array, "d vocab"]


@dataclasses.dataclass(frozen=True)
class BlockDrafter:
    """DFlash, DFlash2 or DSpark as a `speculation.protocol.Drafter`.

    Attributes:
        config: sizes.
        graph: structure of the NNX model; hashable, so that it can be static under `jit`.
        dtype: of the computation and of the ring.
        length: tokens proposed per step, at most `config.length`. The block always has all its
            rows, which see each other; the farthest proposals are left out.
        positions: most positions of a request; what a layer without a window keeps.
    """

    config: DraftConfig
    graph: nnx.GraphDef[DraftModel]
    dtype: str
    length: int
    positions: int | None

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose hidden states it reads."""
        return self.config.taps

    @property
    def window(self) -> int | None:
        """Newest committed positions that it reads; None: all."""
        return self.config.window

    @property
    def estimates_confidence(self) -> bool:
        """Whether proposals carry a confidence."""
        markov = self.config.markov
        return markov is not None and markov.confidence

    def init(self, requests: int) -> Ring:
        """Empty rings."""
        config = self.config
        capacity = ring_capacity(config.windows, config.block_size, self.positions)
        return init_ring(
            requests,
            config.num_layers,
            capacity,
            config.num_kv_heads,
            config.head_dim,
            jnp.dtype(self.dtype),
        )

    def propose(
        self,
        params: DrafterParams,
        state: Ring,
        anchor: Int[Array, " R"],
        length: Int[Array, " R"],
        sampler: Sampler,
    ) -> Proposal:
        """See `speculation.protocol.Drafter`. Rows of the block are never written to the ring."""
        rows = self.rows(params, state, anchor, length)
        hidden, logits = (part[:, 0, : self.length] for part in rows)
        pick = picker(sampler, length)
        return propose(self._model(params), self.config, hidden, logits, anchor, pick)

    def rows(
        self, params: DrafterParams, state: Ring, anchor: Int[Array, " R"], length: Int[Array, " R"]
    ) -> Rows:
        """The proposing rows of one block per request, over its ring; a = 1."""
        config = self.config
        vocabulary = Vocabulary(params["embedding"], params["head"])
        positions = block_positions(config, length[:, None])
        hidden = self._model(params).hidden(
            embed_rows(config, vocabulary, anchor[:, None]),
            positions,
            self._attends(state, positions[:, 0]),
        )
        return propose_rows(config, vocabulary, hidden)

    def _attends(self, state: Ring, positions: Int[Array, "R T"]) -> list[Attend]:
        """Attention of each layer over its part of the ring."""
        config, ring = self.config, KeysValues(state.keys, state.values)
        counts = {w: newest_seen(state, positions, w) for w in set(config.windows)}

        def attend(
            queries: Float[Array, "R one T heads dim"], own: KeysValues, *, layer: int
        ) -> Float[Array, "R one T heads dim"]:
            seen = RingSeen(state.next, counts[config.windows[layer]], block_seen(config, layer))
            own = KeysValues(*(part[:, 0] for part in own))
            return draft_attention(queries[:, 0], ring, own, seen, layer)[:, None]

        return [partial(attend, layer=layer) for layer in range(config.num_layers)]

    def commit(
        self,
        params: DrafterParams,
        state: Ring,
        features: Float[Array, "R X taps"],
        start: Int[Array, " R"],
        count: Int[Array, " R"],
    ) -> Ring:
        """See `speculation.protocol.Drafter`."""
        ahead = jnp.arange(features.shape[1], dtype=jnp.int32)[None]
        context = self._model(params).context(features, start[:, None] + ahead)
        return write(state, context.keys, context.values, start, count)

    def reset(self, state: Ring, row: Int[Array, ""]) -> Ring:
        """See `speculation.protocol.Drafter`."""
        return reset_row(state, row)

    def _model(self, params: DrafterParams) -> DraftModel:
        return nnx.merge(self.graph, params["draft"])


def drafter_of(
    model: DraftModel,
    config: DraftConfig,
    vocabulary: Vocabulary,
    *,
    length: int | None = None,
    positions: int | None = None,
) -> tuple[BlockDrafter, DrafterParams]:
    """Splits a draft into what is static, and its weights.

    Args:
        model: the draft; its dtype is that of the computation and of the ring.
        config: its sizes.
        vocabulary: embedding and head.
        length: tokens to propose per step; None: as many as it can.
        positions: most positions of a request, where they are known.
    """
    graph, state = nnx.split(model)
    drafter = BlockDrafter(
        config=config,
        graph=graph,
        dtype=model.dtype.name,
        length=config.length if length is None else length,
        positions=positions,
    )
    params = DrafterParams(draft=state, embedding=vocabulary.embedding, head=vocabulary.head)
    return drafter, params
