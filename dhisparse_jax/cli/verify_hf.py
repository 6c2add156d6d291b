"""`dhisparse verify-hf`: does the product compute what the reference implementation computes?"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dhisparse_jax.cli import checkpoint_options as own
from dhisparse_jax.cli import format_options as fmt
from dhisparse_jax.cli import options as opt
from dhisparse_jax.cli.interrupt import interrupts
from dhisparse_jax.cli.report import json_line
from dhisparse_jax.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float, Int, Shaped

    from dhisparse_jax.engine.engine import Engine
    from dhisparse_jax.models.registry import LoadedModel

# A wrong epsilon of the latent norm shows only as 5e-5 to 9e-5.
TOLERANCE = 4e-5


@dataclass(frozen=True)
class Verdict:
    """What the comparison found; its fields are the JSON object.

    Attributes:
        max_abs_diff: largest absolute difference of a logit; None where one is not finite.
        argmax_agreement: share of positions with the same most likely token, 0 to 1.
        policy: name of the policy.
        split: tokens that were prefilled.
        queries: tokens that were decoded per step.
        tokens: S, all tokens.
        fetched_rows: records read from the host pool while decoding the others.
        tolerance: what `max_abs_diff` may be.
        passed: whether it is no more than that.
    """

    max_abs_diff: float | None
    argmax_agreement: float
    policy: str
    split: int
    queries: int
    tokens: int
    fetched_rows: int
    tolerance: float
    passed: bool


def verify_hf(
    directory: own.CheckpointDir,
    policy: opt.Policy = opt.PolicyName.ADAPTIVE,
    hot_rows: opt.HotRows = None,
    split: own.Split = None,
    queries: own.Queries = 1,
    tolerance: own.Tolerance = TOLERANCE,
    kv_format: fmt.KvFormat = None,
    index_format: fmt.IndexFormat = None,
) -> None:
    """Compare logits with a reference's, in float32, through prefill and decode.

    History in another format than float32 differs from the reference by what the format rounds:
    choose a --tolerance for it.

    The first --split tokens are prefilled, the others are decoded from the ids given, --queries of
    them per step, and the logits of every position are compared.

    The last line of standard output is one JSON object with max_abs_diff (null: a logit is not
    finite), argmax_agreement, policy, split, queries, tokens,
    fetched_rows, tolerance and passed. Exit
    code: 0 passed, 1 not passed, 2 could not be run.
    """
    from dhisparse_jax.cli.session import load_model, make_engine

    folder = Path(directory)
    tokens = read_inputs(folder)
    reference = read_reference(folder, len(tokens))
    split = choose_split(split, len(tokens))
    hierarchy = opt.HierarchyOptions(policy, hot_rows, 1)
    with interrupts() as check:
        loaded = load_model(directory, formats=fmt.FormatOptions(kv_format, index_format))
        check_vocabulary(loaded, tokens, reference)
        engine = make_engine(loaded, hierarchy, requests=1, positions=len(tokens), queries=queries)
        logits, fetched_rows = run(engine, tokens.tolist(), split, check)
    difference, agreement = compare(logits, reference)
    verdict = Verdict(
        max_abs_diff=difference,
        argmax_agreement=agreement,
        policy=policy.value,
        split=split,
        queries=queries,
        tokens=len(tokens),
        fetched_rows=fetched_rows,
        tolerance=tolerance,
        passed=difference is not None and difference <= tolerance,
    )
    typer.echo(
        f"{'passed' if verdict.passed else 'FAILED'}: {loaded.name}, {len(tokens)} tokens, "
        f"{split} prefilled, policy {policy.value}"
    )
    typer.echo(json_line(asdict(verdict)))
    if not verdict.passed:
        raise typer.Exit(1)


def run(
    engine: "Engine", tokens: Sequence[int], split: int, check: Callable[[], None]
) -> tuple["Float[np.ndarray, 'S V']", int]:
    """The engine's logits after every token, and the rows fetched while decoding.

    `check` is called after every event, and may raise.
    """
    import numpy as np
    from jaxtyping import Float

    from dhisparse_jax.cli.session import teacher_force
    from dhisparse_jax.engine.events import StepDone

    pieces: list[Float[np.ndarray, "n V"]] = []
    fetched_rows = 0
    for event in teacher_force(engine, tokens, split):
        if isinstance(event, np.ndarray):
            pieces.append(event)
        elif isinstance(event, StepDone):
            fetched_rows += event.metrics.fetched_rows
        check()
    return np.concatenate(pieces), fetched_rows


def read_inputs(folder: Path) -> "Int[np.ndarray, ' S']":
    """Token ids of `inputs.npy`. Raises UserError where it is not [1, S] integers, S >= 1."""
    path = folder / "inputs.npy"
    array = read_array(path)
    if array.dtype.kind not in "iu":
        raise UserError(f"{path} holds {array.dtype}; token ids are integers")
    if array.ndim != 2 or array.shape[0] != 1 or array.shape[1] < 1:
        raise UserError(f"{path} has shape {shape_text(array)}; [1, S] with S >= 1 is needed")
    return array[0]


def read_reference(folder: Path, length: int) -> "Float[np.ndarray, 'S V']":
    """Logits of `logits.npy`. Raises UserError where it is not [1, S, V] or [S, V] of `length`."""
    path = folder / "logits.npy"
    array = read_array(path)
    if array.dtype.kind != "f":
        raise UserError(f"{path} holds {array.dtype}; logits are floating-point numbers")
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2 or array.shape[0] != length:
        raise UserError(
            f"{path} has shape {shape_text(array)}; [1, S, V] or [S, V] is needed, with the S of "
            f"inputs.npy, {length}"
        )
    return array


def read_array(path: Path) -> "Shaped[np.ndarray, '...']":
    """A .npy file. Raises UserError where it is missing, unreadable or holds objects."""
    import numpy as np

    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} is not a readable .npy file: {error}") from None
    if not isinstance(array, np.ndarray):
        raise UserError(f"{path} is an archive of arrays; one array is needed")
    return array


def choose_split(split: int | None, length: int) -> int:
    """Half of the tokens by default. Raises UserError where there are fewer than asked for."""
    if split is None:
        return max(1, length // 2)
    if split > length:
        raise UserError(f"--split {split} is more than the {length} tokens of inputs.npy")
    return split


def check_vocabulary(
    loaded: "LoadedModel", tokens: "Int[np.ndarray, ' S']", reference: "Float[np.ndarray, 'S V']"
) -> None:
    """Raises UserError where the files do not belong to the model."""
    size = loaded.model.vocabulary
    if reference.shape[1] != size:
        raise UserError(
            f"logits.npy is over {reference.shape[1]} tokens, but the vocabulary has {size}"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= size:
        raise UserError(
            f"inputs.npy holds token {low if low < 0 else high}; ids go from 0 to {size - 1}"
        )
    if len(tokens) > loaded.context:
        raise UserError(
            f"inputs.npy has {len(tokens)} tokens, more than the context of {loaded.context}"
        )


def compare(
    logits: "Float[np.ndarray, 'S V']", reference: "Float[np.ndarray, 'S V']"
) -> tuple[float | None, float]:
    """The largest difference, in float64, and how often the most likely token is the same.

    The difference is None where there is a NaN or an infinity on either side.
    """
    import numpy as np

    difference = float(np.abs(logits.astype(np.float64) - reference.astype(np.float64)).max())
    agreement = float((logits.argmax(-1) == reference.argmax(-1)).mean())
    return difference if math.isfinite(difference) else None, agreement


def shape_text(array: "Shaped[np.ndarray, '...']") -> str:
    """In: shape (1, 96). Out: "[1, 96]"."""
    return str(list(array.shape))
