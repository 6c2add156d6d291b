"""A model and an engine, made from the options. The only place that builds either."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer

from dhisparse_jax.cli.format_options import FormatOptions
from dhisparse_jax.cli.options import (
    ATTACHED_DRAFT,
    MOST_AT_ONCE,
    NO_DRAFT,
    DraftOptions,
    DtypeName,
    ExpertsName,
    HierarchyOptions,
    PolicyName,
)
from dhisparse_jax.cli.prompts import Prompt
from dhisparse_jax.cli.report import NO_MESH, Setting
from dhisparse_jax.errors import UserError, renamed
from dhisparse_jax.mesh import MeshShape

if TYPE_CHECKING:
    import numpy as np
    from jax.sharding import Mesh
    from jaxtyping import Float

    from dhisparse_jax.config import HierarchyConfig
    from dhisparse_jax.engine.engine import Engine
    from dhisparse_jax.engine.events import Event
    from dhisparse_jax.engine.pace import Limits
    from dhisparse_jax.model import Params
    from dhisparse_jax.models.registry import LoadedModel
    from dhisparse_jax.speculation.protocol import Draft, Drafter
    from dhisparse_jax.speculation.schedule import Rule

PAGE_POSITIONS = 16
"""Of host memory, unless a record stands for another number of positions."""
SMALL_MODEL_BYTES = 1e9
"""Weights that an accelerator reads in less time than the host launches a step in, about 1 ms."""
SMALL_MODEL_STEPS = 4
AS_STORED = FormatOptions()


def load_model(
    name: str,
    dtype: DtypeName = DtypeName.FLOAT32,
    formats: FormatOptions = AS_STORED,
    experts: ExpertsName = ExpertsName.STORED,
    draft: str = NO_DRAFT,
    mesh: "Mesh | None" = None,
) -> "LoadedModel":
    """Load `tiny` or a checkpoint folder, onto a mesh if there is one, for a draft of that name.

    Raises:
        UserError: there is none that works.
    """
    from dhisparse_jax.models import registry

    with renamed(formats.names()):
        loaded = registry.load(
            name,
            dtype.value,
            stored_experts=experts is ExpertsName.STORED,
            kv_format=formats.rows and formats.rows.value,
            index_format=formats.keys and formats.keys.value,
            mesh=mesh,
        )
    count = len(loaded.unused) + (len(loaded.drafts) if draft != ATTACHED_DRAFT else 0)
    if count:
        typer.echo(f"{name}: {count} tensors are of parts of the model that are not used", err=True)
    return loaded


def load_draft(options: DraftOptions, loaded: "LoadedModel") -> "Draft":
    """Load a draft for a model. Raises UserError where there is none that fits."""
    from dhisparse_jax.speculation import protocol

    if options.name == NO_DRAFT:
        if options.length is not None or options.auto:
            raise UserError("--draft-length needs a draft; name one with --draft")
        return protocol.NO_DRAFT
    from dhisparse_jax.models.draft import registry

    drafter, params = registry.load_draft(options.name, loaded, options.length)
    return protocol.Draft(drafter=drafter, params=params)


def rule_of(drafter: "Drafter", auto: bool) -> "Rule":
    """How many proposals are verified: all, or those that pay."""
    from dhisparse_jax.speculation.schedule import Rule

    if not auto:
        return Rule.ALL
    return Rule.STALE if drafter.estimates_confidence else Rule.HISTORY


def encode(loaded: "LoadedModel", prompt: Prompt, *, chat: bool = False) -> tuple[int, ...]:
    """Tokens of a text, or with `chat` of a conversation in which a user says it.

    Raises:
        UserError: the vocabulary cannot hold it, it has none, or there is no usable chat template.
    """
    try:
        tokens = chat_tokens(loaded, prompt) if chat else loaded.tokenizer.encode(prompt.data)
    except UserError as error:
        raise UserError(f"{prompt.name}: {error}") from error
    if not tokens:
        raise UserError(f"{prompt.name} gives no tokens; at least one is needed")
    return tokens


def chat_tokens(loaded: "LoadedModel", prompt: Prompt) -> tuple[int, ...]:
    """Tokens of a conversation up to where the answer begins. Raises UserError as `encode`."""
    from dhisparse_jax.models.chat import load_chat_template
    from dhisparse_jax.models.tokenizer import FileTokenizer, text_of

    template = load_chat_template(loaded.directory)
    if not isinstance(loaded.tokenizer, FileTokenizer):
        raise UserError(f"--chat needs the tokenizer.json of {loaded.directory}, which is missing")
    message = text_of(prompt.data, "a chat template")
    text = template.render([{"role": "user", "content": message}])
    return loaded.tokenizer.encode(text.encode(), bare=True)


def make_engine(
    loaded: "LoadedModel",
    options: HierarchyOptions,
    *,
    requests: int,
    positions: int,
    queries: int = 1,
    draft: "Draft | None" = None,
    auto: bool = False,
    limits: "Limits | None" = None,
) -> "Engine":
    """An engine with room for the work at hand.

    Args:
        loaded: the model.
        options: policy and sizes.
        requests: how many requests there are.
        positions: tokens of the longest request, prompt and new ones.
        queries: tokens per request and step: known ones, or the anchor and what a draft proposes.
        draft: what proposes tokens; None: nothing.
        auto: verify as many of them as pay.
        limits: what the engine is held to; None: nothing.

    Raises:
        UserError: the pools do not fit into memory.
    """
    from dhisparse_jax.engine.engine import Engine
    from dhisparse_jax.engine.pace import NO_LIMITS
    from dhisparse_jax.speculation import protocol

    draft = draft or protocol.NO_DRAFT
    return Engine(
        loaded.model,
        loaded.params,
        config_for(loaded, options, requests, positions, queries),
        draft=draft,
        rule=rule_of(draft.drafter, auto),
        steps=options.dispatch_steps or default_dispatch_steps(loaded.params),
        limits=limits or NO_LIMITS,
        mesh=loaded.mesh,
    )


def config_for(
    loaded: "LoadedModel", options: HierarchyOptions, requests: int, positions: int, queries: int
) -> "HierarchyConfig":
    """Sizes of each device for the work at hand; see `make_engine`.

    Raises:
        UserError: as `host_pages`, or the devices do not divide the requests.
    """
    from dhisparse_jax.config import HierarchyConfig, Policy, usual_tail
    from dhisparse_jax.engine.memory import default_hot_rows
    from pallas_kernels.index_scores.mosaic import KEYS_UNIT

    geometry, shape = loaded.model.geometry, MeshShape.of(loaded.mesh)
    rows = min(-(-requests // shape.devices), MOST_AT_ONCE)
    rows = rows if options.batch is None else shape.rows(options.batch)
    # A selection is never larger than the room for history.
    rate = max(geometry.rates, default=1)
    longest = max(positions + queries - 1, geometry.top_k * rate)
    # Whole units of keys: a kernel takes a table of any other length as a copy, in every step.
    unit = KEYS_UNIT * rate
    capacity = min(-(-longest // unit) * unit, loaded.context)
    config = HierarchyConfig(
        geometry=geometry,
        policy=Policy(options.policy.value),
        requests=rows,
        capacity=capacity,
        queries=queries,
        hot_rows=options.hot_rows or default_hot_rows(geometry, rows, capacity),
        tail=usual_tail(queries),
        host_page=geometry.whole * max(1, PAGE_POSITIONS // geometry.whole),
        record_selections=options.record,
    )
    if options.host_memory is None:
        return config
    pages = host_pages(config, options.host_memory, positions, shape.devices)
    return dataclasses.replace(config, host_pages=pages)


def default_dispatch_steps(params: "Params") -> int:
    """Steps at once for a model with these weights: several if reading them takes no time."""
    import jax

    small = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) < SMALL_MODEL_BYTES
    return SMALL_MODEL_STEPS if small and jax.default_backend() != "cpu" else 1


def host_pages(
    config: "HierarchyConfig", gigabytes: float, positions: int, devices: int = 1
) -> int:
    """Host pages of a device that so many GB of all hold, but not more than all rows can use.

    Args:
        config: sizes of the hierarchy.
        gigabytes: in 10**9 bytes.
        positions: tokens of the longest request.
        devices: how many share them.

    Raises:
        UserError: the longest request does not fit.
    """
    size = config.host_page_bytes * devices
    pages, needed = int(gigabytes * 1e9) // size, -(-positions // config.host_page)
    if pages < needed:
        raise UserError(
            f"--host-memory {gigabytes:g} GB holds {pages * config.host_page:,} tokens; the "
            f"longest request has {positions:,}: give at least "
            f"{math.ceil(needed * size / 1e3) / 1e6}, or shorten it"
        )
    return min(pages, config.host_page_count)


def teacher_force(
    engine: "Engine", tokens: Sequence[int], split: int
) -> Iterator["Event | Float[np.ndarray, 'n V']"]:
    """Events, and the logits after each token in order; the first `split` tokens are prefilled."""
    from dhisparse_jax.engine.forced import forced_logits

    return forced_logits(engine, tokens, split)


def setting_of(loaded: "LoadedModel", policy: PolicyName, draft: str = NO_DRAFT) -> Setting:
    """What the run runs with."""
    import jax

    return Setting(
        model=loaded.name,
        backend=jax.default_backend(),
        jax_version=jax.__version__,
        policy=policy.value,
        draft=draft,
        kv_format=loaded.model.geometry.row.name,
        index_format=loaded.model.geometry.index_format,
        mesh=str(MeshShape.of(loaded.mesh)) if loaded.mesh else NO_MESH,
    )
