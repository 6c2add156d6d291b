"""One chip's share of a model, and its decode step as a row of `bench.tpu_aot`.

Routed experts are spread over all chips. Heads, dense MLPs and vocabulary are whole on a chip, or
spread over few (`bench.shard_glm.split`), which then have the same requests, and their rows, keys
and host pools each. What goes between chips is left out. Experts get the picks of all requests of
such a group, as many times their share as it has chips.
"""

from typing import Any, NamedTuple

from bench.kernels import CONSOLE, Row
from bench.roofline import Traffic, bound
from bench.shard_cells import Cell
from bench.shard_memory import account
from bench.shard_setup import Setup, abstract_setup
from bench.tpu_report import PUBLISHED, REFUSED, check_in_place, first_line, said_of, tell
from bench.tpu_step import RESERVED_BYTES, TOPOLOGIES, compile_operands, compile_tpu_step
from bench.work import WrongResultError
from dhisparse_jax.config import Policy
from dhisparse_jax.models.glm.memory import FIXED_ROWS
from pallas_kernels.common.interpret import ahead_of_time
from pallas_kernels.common.rows import WORD_BYTES

HEADS_OVER = {"v5e": 4, "v6e": 1}
"""Chips that heads are spread over, without another number: attention alone takes 13 GB."""


class Share(NamedTuple):
    """What one chip has of a model, and its load.

    Attributes:
        setup: shapes.
        cell: the load.
        chips: that share the routed experts.
        heads_over: of those, that share heads and requests.
    """

    setup: Setup
    cell: Cell
    chips: int
    heads_over: int


def step_row(name: str, share: Share, topology: str) -> Row:
    """Compile a decode step, and say what the compiler and the model say."""
    setup, cell = share.setup, share.cell
    with ahead_of_time(TOPOLOGIES[topology]):
        traffic = _step_traffic(setup, cell)
    least = bound(traffic, PUBLISHED[TOPOLOGIES[topology]])
    layers = setup.model.config.num_layers
    row: Row = {"op": "decode_step", "case": f"{name}_{layers}_layers", "time_us": None}
    row |= {"floor_us": least.us, "ratio": None, "bound": least.name}
    detail: dict[str, Any] = {"backend": "tpu", "model": {**traffic._asdict(), "copies": 0}}
    detail["sizes"] = _sizes(share)
    try:
        detail |= _compiled(share, topology)
    except REFUSED as reason:
        detail["reason"] = first_line(reason)
    tell(row, detail, least)
    return {**row, "detail": detail}


def _sizes(share: Share) -> dict[str, Any]:
    model, config, cell = share.setup.model, share.setup.model.config, share.cell
    return {
        "chips": share.chips,
        "heads_over": share.heads_over,
        "policy": cell.policy.value,
        "requests": cell.requests,
        "queries": share.setup.drafter.length + 1,
        "positions": share.setup.capacity,
        "hot_rows": cell.hot_rows,
        "layers": config.num_layers,
        "experts_per_layer": model.experts,
        "heads": config.num_heads,
        "dense_width": config.dense_intermediate_size,
        "vocabulary": config.vocab_size,
    }


def _compiled(share: Share, topology: str) -> dict[str, Any]:
    """What the compiler says of the operands, and of all programs.

    Raises:
        WrongResultError: a host pool is copied, or programs need more than is reserved for them.
    """
    operands = said_of(compile_operands(share.setup, share.cell, topology))["memory"]
    sizes = {kind: operands[f"{kind}_bytes"] for kind in ("argument", "host_argument")}
    sizes["argument"] -= RESERVED_BYTES
    CONSOLE.print(
        f"operands fit: {sizes['argument'] / 1e9:.2f} GB on the device, "
        f"{sizes['host_argument'] / 1e9:.2f} GB on the host",
        highlight=False,
    )
    programs = compile_tpu_step(share.setup, share.cell, topology)
    said = {each: said_of(program) for each, program in programs.items()}
    for each, program in programs.items():
        if program.pool_bytes:
            check_in_place(said[each]["memory"], program.pool_bytes, program.pool_bytes)
    memory = _together(said) | {
        **{f"{kind}_bytes": size for kind, size in sizes.items()},
        "reserved_bytes": RESERVED_BYTES,
    }
    needed = memory["temporary_bytes"] + memory["code_bytes"]
    if needed > RESERVED_BYTES:
        raise WrongResultError(f"programs need {needed} bytes, {RESERVED_BYTES} are reserved")
    seconds = sum(each["compile_s"] for each in said.values())
    return {"programs": said, "memory": memory, "compile_s": round(seconds, 2)}


def _together(said: dict[str, dict[str, Any]]) -> dict[str, int]:
    """The most that a program needs beside its operands, and the code of all."""
    memory = [each["memory"] for each in said.values()]
    most = {
        kind: max(each[kind] for each in memory)
        for kind in ("temporary_bytes", "host_temporary_bytes")
    }
    return most | {"code_bytes": sum(each["code_bytes"] for each in memory)}


def _step_traffic(setup: Setup, cell: Cell) -> Traffic:
    """Weights but for the embedding, index keys, and the lines of what every query selects."""
    held = account(setup, cell).bytes
    state = ("embedding", "hot records", "tails", "staging", "tables", "workspace", "replayed")
    read = sum(size for kind, size in held.items() if kind not in state)
    cfg, config = setup.config(cell), setup.model.config
    row = WORD_BYTES * cfg.record_layout.row_stride(cfg.geometry.row.words)
    queries = cell.requests * (setup.drafter.length + 1)
    return Traffic(hbm_bytes=read + queries * config.num_layers * config.index_top_k * row)


def share_of(
    model: str,
    topology: str,
    *,
    layers: int | None,
    chips: int,
    heads_over: int | None,
    draft: str,
    requests: int,
    context: int,
) -> Share:
    """One chip's share of a model, and its load: adaptive, with the slots of `fixed`.

    Raises:
        UserError: the chips do not divide the heads, or what goes with them.
    """
    heads_over = heads_over or HEADS_OVER[TOPOLOGIES[topology]]
    with ahead_of_time(TOPOLOGIES[topology]):
        setup = abstract_setup(
            model,
            layers=layers,
            context=context,
            room=64,
            draft=draft,
            requests=requests,
            traces=requests,
            gpus=chips,
            heads_over=heads_over,
        )
    cell = Cell(
        name="adaptive",
        policy=Policy.ADAPTIVE,
        draft=draft,
        requests=requests,
        hot_rows=FIXED_ROWS * setup.model.config.index_top_k,
    )
    return Share(setup, cell, chips, heads_over)
