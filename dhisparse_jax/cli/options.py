"""Every option, written once, with its unit and its default. Knows nothing about what they do."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dhisparse_jax.cli.checks import (
    AUTO,
    count,
    dispatch_steps,
    draft_length,
    positive,
)

HIERARCHY = "KV hierarchy"
SPECULATION = "Speculation"
OUTPUT = "Output"

BUNDLED_MODEL = "tiny"
NO_DRAFT = "none"
BUNDLED_DRAFT = "dflash2"
ATTACHED_DRAFT = "dspark"
MOST_AT_ONCE = 8


class PolicyName(StrEnum):
    """`dhisparse_jax.config.Policy` by name, without the import of jax that it takes."""

    ADAPTIVE = "adaptive"
    FIXED = "fixed"
    RESIDENT = "resident"


class DtypeName(StrEnum):
    """Floating-point types that a model can run in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class ExpertsName(StrEnum):
    """What becomes of experts that a checkpoint has quantised."""

    STORED = "stored"
    FLOAT = "float"


@dataclass(frozen=True)
class HierarchyOptions:
    """The options of the hierarchy, as given.

    Attributes:
        policy: how device memory is shared out.
        hot_rows: rows per request on the device; None: from the memory there is.
        batch: requests at the same time; None: all of them, at most MOST_AT_ONCE.
        record: keep what a step selects, so that it can be recorded.
        host_memory: of the host pools, in GB; None: what all requests need that run at once.
        dispatch_steps: decode steps that the device is given at once; None: by the model's size.
    """

    policy: PolicyName
    hot_rows: int | None = None
    batch: int | None = None
    record: bool = False
    host_memory: float | None = None
    dispatch_steps: int | None = None


@dataclass(frozen=True)
class DraftOptions:
    """The options of speculation, as given.

    Attributes:
        name: of a bundled draft, a checkpoint folder, or NO_DRAFT.
        length: tokens to propose per step; None: as many as the draft can.
        auto: verify as many of them as pay, instead of all.
    """

    name: str = NO_DRAFT
    length: int | None = None
    auto: bool = False

    @classmethod
    def of(cls, model: str, name: str | None, length: str | None) -> "DraftOptions":
        """From the options; `length` is a number or AUTO.

        Without a name, the bundled model gets the bundled draft, others what their checkpoint has
        attached, and none where that is nothing.
        """
        auto = length == AUTO
        if name is None:
            name = BUNDLED_DRAFT if model == BUNDLED_MODEL else _attached(model)
        return cls(name, None if length is None or auto else int(length), auto)


def _attached(model: str) -> str:
    """The draft in the folder of a checkpoint."""
    if not Path(model).is_dir():
        return NO_DRAFT  # that there is no such model is said where it is loaded
    from dhisparse_jax.models.attached.load import is_attached

    return ATTACHED_DRAFT if is_attached(Path(model)) else NO_DRAFT


Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="tiny|DIR",
        help="The bundled model, or the folder of a Hugging Face checkpoint (config.json and "
        "safetensors).",
    ),
]
Dtype = Annotated[
    DtypeName,
    typer.Option("--dtype", help="What the model computes and keeps its history in."),
]

Experts = Annotated[
    ExpertsName,
    typer.Option(
        "--experts",
        help="Quantised experts. stored: they stay as they are in memory, and scales are applied "
        "inside the matrix products; float: they become numbers of --dtype.",
    ),
]

# How the hierarchy is set up
Policy = Annotated[
    PolicyName,
    typer.Option(
        "--policy",
        help="How device memory is shared out. adaptive: by need, as the load changes; fixed: "
        "the same for every request; resident: all history stays there. All give the same tokens.",
        rich_help_panel=HIERARCHY,
    ),
]
HotRows = Annotated[
    int | None,
    typer.Option(
        "--hot-rows",
        metavar="N",
        callback=count,
        help="Rows of history per request, and pool of layers, that the device holds; under "
        "adaptive N x requests in all. Default: from the memory there is.",
        rich_help_panel=HIERARCHY,
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch",
        metavar="N",
        callback=count,
        help="Requests at the same time; others wait until one ends. Default: all, at most "
        f"{MOST_AT_ONCE}.",
        rich_help_panel=HIERARCHY,
    ),
]

HostMemory = Annotated[
    float | None,
    typer.Option(
        "--host-memory",
        metavar="GB",
        callback=positive,
        help="Host memory for the history of all requests, in 10^9 bytes; who does not fit waits. "
        "Default: what --batch requests of the longest length need.",
        rich_help_panel=HIERARCHY,
    ),
]

DispatchSteps = Annotated[
    int | None,
    typer.Option(
        "--dispatch-steps",
        metavar="N",
        callback=dispatch_steps,
        help="Decode steps that the device is given at once. More cost the host less per step, but "
        "requests wait for all of them to come and go. Default: 1; on an accelerator 4 for a model "
        "so small that a step takes less time than to launch it.",
        rich_help_panel=HIERARCHY,
    ),
]

# How several tokens come out of one step
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="none|dflash|dflash2|dspark|DIR",
        help="A small model that proposes tokens, which the model verifies together: a bundled "
        "one, or the folder of a checkpoint made for this model. Of DeepSeek-V4 and V4.1, "
        f"{ATTACHED_DRAFT} is the one in the model's own checkpoint. Greedy tokens are the same "
        "with every draft, sampled ones have the same distribution. Default: "
        f"{BUNDLED_DRAFT} for tiny, {ATTACHED_DRAFT} where the checkpoint has one, else none.",
        rich_help_panel=SPECULATION,
    ),
]
DraftLength = Annotated[
    str | None,
    typer.Option(
        "--draft-length",
        metavar="N|auto",
        callback=draft_length,
        help="Tokens to propose per step; auto: verify as many as pay at the measured speed, so "
        "that sampled texts are not repeatable. Default: as many as the draft can.",
        rich_help_panel=SPECULATION,
    ),
]

# What decode continues
PromptFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt-file",
        "-p",
        metavar="FILE",
        help="A text to continue, - for standard input; repeat it for several requests. Default: "
        "4 standard library modules that tiny was not trained on.",
    ),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Answer the text instead of continuing it, by the checkpoint's chat template.",
    ),
]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens", "-n", metavar="N", callback=count, help="Tokens to add, at most."
    ),
]

# What is written beside the text
Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write tokens and metrics as JSON, also when interrupted; -: to standard output, and "
        "all else to standard error.",
        rich_help_panel=OUTPUT,
    ),
]
RecordSelections = Annotated[
    Path | None,
    typer.Option(
        "--record-selections",
        metavar="FILE",
        help="Write which rows every step selected, also when interrupted: what "
        "`python -m bench.simulate --trace FILE` replays.",
        rich_help_panel=OUTPUT,
    ),
]
TraceDir = Annotated[
    Path | None,
    typer.Option(
        "--trace-dir",
        metavar="DIR",
        help="Write a JAX profiler trace, with the stages of a step named.",
        rich_help_panel=OUTPUT,
    ),
]

# What evaluate reads
Files = Annotated[
    list[str],
    typer.Argument(metavar="FILE", help="Files to evaluate, each on its own."),
]
