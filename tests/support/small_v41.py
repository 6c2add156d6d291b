"""The small DeepSeek-V4.1 checkpoint in tests/fixtures, as a served model in engines."""

import json
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.request import Request
from dhisparse_jax.hierarchy import Attended
from dhisparse_jax.hierarchy.formats import stored_keys, stored_rows
from dhisparse_jax.hierarchy.layout import row_options
from dhisparse_jax.hierarchy.select import choose
from dhisparse_jax.model import Beside
from dhisparse_jax.models.deepseek_v41.decode import serve
from dhisparse_jax.models.hf import load_hf
from dhisparse_jax.speculation.protocol import NO_DRAFT
from pallas_kernels.sparse_attention.api import sparse_attention
from tests.support.small_v4 import POLICIES, table_draft

FIXTURE = Path(__file__).parents[1] / "fixtures" / "deepseek_v41_tiny"
RAW = json.loads((FIXTURE / "config.json").read_text())
TEXT = RAW["text_config"]
TOKENS = np.load(FIXTURE / "inputs.npy")[0]
LOGITS = np.load(FIXTURE / "logits.npy")
CONTEXT = 64


@cache
def loaded():
    """The model as it is loaded."""
    return load_hf(FIXTURE).model


@cache
def model(form=None):
    """The served model and its weights; `form`: of rows and index keys."""
    return serve(loaded(), "float32", form, form)


@cache
def weights():
    """The published tensors in float64."""
    found = load_file(FIXTURE / "model.safetensors")
    return {name: tensor.astype(np.float64) for name, tensor in found.items()}


def layer_weights(layer):
    """Those of one layer, without its number."""
    start = f"layers.{layer}."
    return {n.removeprefix(start): w for n, w in weights().items() if n.startswith(start)}


def config(policy, hot_rows, *, requests=2, queries=1, form=None, **sizes):
    return HierarchyConfig(
        geometry=model(form)[0].geometry,
        policy=Policy(policy),
        requests=requests,
        capacity=CONTEXT,
        queries=queries,
        hot_rows=hot_rows,
        tail=max(2, 2 * queries),
        host_page=12,
        **sizes,
    )


@cache
def engine(policy, queries=1):
    """An engine shared by all tests of this process: compiling one takes long."""
    cfg = config(*POLICIES[policy], queries=queries)
    draft = NO_DRAFT
    if queries > 1:
        draft = table_draft([[0], [0]], queries - 1, model()[0].vocabulary)
    return Engine(*model(), cfg, chunk=5, draft=draft)


def request(length, new, seed=0, **options):
    """A request with a random prompt."""
    prompt = tuple(np.random.default_rng(seed).integers(3, TEXT["vocab_size"], length).tolist())
    return Request(name=f"{length}+{new}", prompt=prompt, max_new_tokens=new, **options)


def dense(tokens, form=None):
    """A whole text without a hierarchy.

    Returns:
        Logits, what every layer that selects has selected, and the blocks left to the others.
    """
    given = jnp.asarray(tokens, jnp.int32)[None]
    logits, selections, blocks = _dense(model()[1], given, form)
    return np.asarray(logits[0]), [np.asarray(s[0]) for s in selections], np.asarray(blocks[0])


@partial(jax.jit, static_argnums=2)
def _dense(params, tokens, form):
    served, count = model(form)[0], tokens.shape[1]
    geometry, selections, blocks = served.geometry, [], []
    positions = jnp.arange(count, dtype=jnp.int32)[None]
    x = served.embed(params, tokens)
    for pool, kept in enumerate(geometry.kept):
        visible = (positions + 1) // geometry.rate(pool)

        def open_group(index, opened=None, pool=pool, visible=visible):
            if opened is None:
                keys, rows, found = stored_keys(geometry, index.keys), None, None
            else:
                keys, rows, found = opened
            found = choose(geometry, pool, index, keys, visible, found and found.blocks)
            selections.append(found.records)
            if found.blocks is not None:
                blocks.append(found.blocks)
            return keys, rows, found

        def attend(opened, layer, rows, query):
            keys, before, found = opened
            rows = before if rows is None else stored_rows(geometry.row, rows[0])
            options = row_options(geometry, layer * geometry.row.words)
            attended = sparse_attention(query, rows, found.records, **options)
            return Attended(*attended), (keys, rows, found)

        leaves = tuple(
            jnp.zeros((1, leaf.rows(count, count), leaf.width), leaf.dtype) for leaf in kept
        )
        beside = Beside(tokens=tokens, kept=leaves, writes=jnp.ones(1, bool))
        x = served.run_group(params, pool, x, positions, open_group, attend, (), beside).x
    return served.logits(params, x), selections, blocks[0]
