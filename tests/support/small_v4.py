"""The small DeepSeek-V4 checkpoint in tests/fixtures, as a served model in engines."""

import dataclasses
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.request import Request
from dhisparse_jax.hierarchy import Attended
from dhisparse_jax.hierarchy.formats import stored_rows
from dhisparse_jax.hierarchy.layout import row_options
from dhisparse_jax.model import Beside, layers_per_group
from dhisparse_jax.models.deepseek_v4 import decode
from dhisparse_jax.models.deepseek_v4.decode import serve
from dhisparse_jax.models.deepseek_v4.moe import V4Router
from dhisparse_jax.models.hf import load_hf
from dhisparse_jax.speculation.protocol import NO_DRAFT, Draft, NoDraft, Proposal
from pallas_kernels.sparse_attention.api import sparse_attention
from pallas_kernels.top_k.api import top_k

FIXTURE = Path(__file__).parents[1] / "fixtures" / "deepseek_v4_tiny"
TOKENS = np.load(FIXTURE / "inputs.npy")[0]
LOGITS = np.load(FIXTURE / "logits.npy")
CONTEXT, RATE, TOP_K = 64, 3, 4
HOST_PAGE = 15
POLICIES = {"resident": ("resident", 1), "fixed": ("fixed", 2), "adaptive": ("adaptive", 8)}
"""Policy and hot rows: all records, half of K, and twice K on average."""


@cache
def model(kv_format=None):
    """The served model and its weights."""
    return serve(load_hf(FIXTURE).model, "float32", kv_format)


def config(policy, hot_rows, *, requests=2, queries=1, kv_format=None, **sizes):
    return HierarchyConfig(
        geometry=model(kv_format)[0].geometry,
        policy=Policy(policy),
        requests=requests,
        capacity=CONTEXT,
        queries=queries,
        hot_rows=hot_rows,
        tail=max(2, 2 * queries),
        host_page=HOST_PAGE,
        **sizes,
    )


@cache
def engine(policy, queries=1):
    """An engine shared by all tests of this process: compiling one takes long.

    With several queries it has a draft, whose texts a test sets. Prompts are prefilled in pieces
    that end anywhere in a window or a stretch.
    """
    cfg = config(*POLICIES[policy], queries=queries, record_selections=queries > 1)
    draft = table_draft([[0], [0]], queries - 1) if queries > 1 else NO_DRAFT
    return Engine(*model(), cfg, chunk=5, draft=draft)


def request(length, new, seed=0, **options):
    """A request with a random prompt."""
    vocabulary = model()[0].vocabulary
    prompt = tuple(np.random.default_rng(seed).integers(0, vocabulary, length).tolist())
    return Request(name=f"{length}+{new}", prompt=prompt, max_new_tokens=new, **options)


def dense(tokens, kv_format=None):
    """A whole text without a hierarchy.

    Returns:
        Logits, what every "selected" layer selects, experts and weights of every layer, and what a
        draft reads of every layer with the streams after it.
    """
    given = jnp.asarray(tokens, jnp.int32)[None]
    logits, selections, routings, read = _dense(model()[1], given, kv_format)
    return np.asarray(logits[0]), [np.asarray(s[0]) for s in selections], routings, read


@partial(jax.jit, static_argnums=2)
def _dense(params, tokens, kv_format):
    served, (_, count) = model(kv_format)[0], tokens.shape
    geometry, selections, routings = served.geometry, [], []
    taps, streams = [], []
    positions = jnp.arange(count, dtype=jnp.int32)[None]
    complete = (positions[0] + 1) // geometry.rate(0)

    def open_group(index):
        dots = jnp.einsum("thd,ed->the", index.queries[0], index.keys[0], precision="highest")
        scores = jnp.einsum("th,the->te", index.weights[0], jnp.maximum(dots, 0.0))
        seen = jnp.arange(scores.shape[1])[None] < complete[:, None]
        selections.append(top_k(jnp.where(seen, scores, -jnp.inf)[None], geometry.top_k))
        return selections[-1]

    def attend(selection, layer, rows, query):
        attended = sparse_attention(
            query,
            stored_rows(geometry.row, rows[0]),
            selection,
            **row_options(geometry, 0),
        )
        return Attended(*attended), selection

    def spy(router, x, tokens, original=V4Router.__call__):
        routings.append(original(router, x, tokens))
        return routings[-1]

    def connect(*args, original=decode.connected):
        streams.append(original(*args))
        return streams[-1]

    x = served.embed(params, tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(V4Router, "__call__", spy)
        patch.setattr(decode, "connected", connect)
        for pool, kept in enumerate(geometry.kept):
            leaves = tuple(
                jnp.zeros((1, leaf.rows(count, count), leaf.width), leaf.dtype) for leaf in kept
            )
            beside = Beside(tokens=tokens, kept=leaves, writes=jnp.ones(1, bool))
            every = tuple(range(layers_per_group(geometry)[pool]))
            ran = served.run_group(params, pool, x, positions, open_group, attend, every, beside)
            x, taps = ran.x, [*taps, *ran.taps]
    read = list(zip(taps, streams[1::2], strict=True))  # each layer connects twice
    return served.logits(params, x), selections, routings, read


@dataclasses.dataclass(frozen=True)
class TableDrafter(NoDraft):
    """Proposes what a table has for a position, and errs at every third one; reads no layers."""

    length: int = 3
    vocabulary: int = 96

    def propose(self, params, state, anchor, length, sampler):
        position = length[:, None] + 1 + jnp.arange(self.length, dtype=jnp.int32)[None]
        row = jnp.arange(anchor.shape[0], dtype=jnp.int32)[:, None]
        tokens = params[row, jnp.minimum(position, params.shape[1] - 1)]
        tokens = jnp.where(position % 3 == 0, (tokens + 1) % self.vocabulary, tokens)
        ones = jnp.ones(tokens.shape, jnp.float32)
        return Proposal(
            tokens=tokens,
            candidates=tokens[..., None],
            probabilities=ones[..., None],
            confidence=ones,
        )


def table_draft(texts, length, vocabulary=96):
    """A draft that knows a text of every row."""
    table = np.zeros((len(texts), CONTEXT), np.int32)
    for row, text in enumerate(texts):
        table[row, : len(text)] = text
    return Draft(
        drafter=TableDrafter(length=length, vocabulary=vocabulary), params=jnp.asarray(table)
    )
