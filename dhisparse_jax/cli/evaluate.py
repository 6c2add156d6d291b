"""`dhisparse evaluate`: bits per byte of files, with the history in the hierarchy."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from dhisparse_jax.cli import format_options as fmt
from dhisparse_jax.cli import options as opt
from dhisparse_jax.cli.interrupt import interrupts
from dhisparse_jax.cli.prompts import Prompt, read_prompts
from dhisparse_jax.cli.report import json_line

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float

    from dhisparse_jax.engine.engine import Engine
    from dhisparse_jax.models.registry import LoadedModel

# Tokens of a file are known beforehand, so a step can take many of them.
TOKENS_PER_STEP = 16


@dataclass(frozen=True)
class Window:
    """Tokens `start` to `end` of a file go through the model; those from `first` on count."""

    start: int
    first: int
    end: int


@dataclass(frozen=True)
class FileScore:
    """What one file costs.

    Attributes:
        name: as shown.
        size: bytes of the file.
        bits: total of -log2 p over its tokens.
    """

    name: str
    size: int
    bits: float

    @property
    def bits_per_byte(self) -> float:
        """Bits over bytes."""
        return self.bits / self.size


def evaluate(
    files: opt.Files,
    model: opt.Model = opt.BUNDLED_MODEL,
    dtype: opt.Dtype = opt.DtypeName.FLOAT32,
    policy: opt.Policy = opt.PolicyName.ADAPTIVE,
    hot_rows: opt.HotRows = None,
    kv_format: fmt.KvFormat = None,
    index_format: fmt.IndexFormat = None,
) -> None:
    """Bits per byte of each file: how well the model predicts it.

    Every token is predicted from those before it, in decode steps over the hierarchy, 16 tokens
    each. Where the model has no token that starts a text, the first token of a file counts as
    log2 of the vocabulary's size. A file longer than the context is read in windows of the
    context's length that overlap by half: a token counts once, in the first window that holds it,
    with half a context before it or more. The total is all bits over all bytes.

    The last line of standard output is one JSON object:
    {"files": [{"name", "bytes", "bits_per_byte"}], "bits_per_byte"}.
    """
    formats = fmt.FormatOptions(kv_format, index_format)
    hierarchy = opt.HierarchyOptions(policy, hot_rows, batch=1)
    prompts = read_prompts(files)
    with interrupts() as check:
        from dhisparse_jax.cli.session import load_model

        loaded = load_model(model, dtype, formats)
        scores = run(prompts, loaded, hierarchy, check)
    typer.echo(json_line(document(scores)))


def run(
    prompts: Sequence[Prompt],
    loaded: "LoadedModel",
    hierarchy: opt.HierarchyOptions,
    check: Callable[[], None],
) -> list[FileScore]:
    """Score the files one after the other, and print a line for each.

    Args:
        prompts: the files.
        loaded: the model.
        hierarchy: policy and sizes.
        check: called between steps; raises KeyboardInterrupt if the run is to stop.
    """
    from dhisparse_jax.cli.session import encode, make_engine

    encoded = [encode(loaded, prompt) for prompt in prompts]
    longest = window_length(loaded.context)
    engine = make_engine(
        loaded,
        hierarchy,
        requests=1,
        positions=min(max(len(tokens) for tokens in encoded), longest),
        queries=TOKENS_PER_STEP,
    )
    scores = []
    for prompt, tokens in zip(prompts, encoded, strict=True):
        with make_progress() as progress:
            task = progress.add_task(prompt.name, total=len(tokens))
            advance = partial(advanced, progress, task, check)
            bits = file_bits(engine, loaded, tokens, longest, advance)
        scores.append(FileScore(prompt.name, len(prompt.data), bits))
        typer.echo(f"{scores[-1].bits_per_byte:8.4f} bits per byte  {prompt.name}")
    return scores


def advanced(progress: Progress, task: TaskID, check: Callable[[], None], count: int) -> None:
    """Show that so many more tokens are done, and look whether to stop."""
    progress.advance(task, count)
    check()


def window_length(context: int) -> int:
    """Tokens of a window: the context, less what the last step may reach beyond the file."""
    return max(context - TOKENS_PER_STEP + 1, 2)


def file_bits(
    engine: "Engine",
    loaded: "LoadedModel",
    tokens: Sequence[int],
    longest: int,
    advance: Callable[[int], None],
) -> float:
    """Total bits of a file.

    Args:
        engine: with room for `longest` positions.
        loaded: the model, for its tokenizer and vocabulary.
        tokens: the file's, one or more.
        longest: tokens of a window.
        advance: told how many more tokens are done, after every step; may raise.
    """
    # A token without text only starts the file: nothing has to predict it.
    bits = 0.0 if not loaded.tokenizer.decode(tokens[:1]) else math.log2(loaded.model.vocabulary)
    advance(1)
    for window in windows(len(tokens), longest):
        bits += window_bits(engine, tokens, window, advance)
    return bits


def window_bits(
    engine: "Engine", tokens: Sequence[int], window: Window, advance: Callable[[int], None]
) -> float:
    """Bits of the tokens that count in a window; those before them are prefilled."""
    import numpy as np

    from dhisparse_jax.cli.session import teacher_force

    bits = 0.0
    position = window.start  # of the token whose logits' piece comes next
    inputs = tokens[window.start : window.end]
    for event in teacher_force(engine, inputs, window.first - window.start):
        if not isinstance(event, np.ndarray):
            advance(0)
            continue
        # Logits after token i are about token i + 1.
        low = max(position + 1, window.first)
        high = min(position + 1 + len(event), window.end)
        if low < high:
            rows = event[low - position - 1 : high - position - 1]
            bits += bits_of(rows, tokens[low:high])
            advance(high - low)
        position += len(event)
    return bits


def bits_of(logits: "Float[np.ndarray, 'n V']", tokens: Sequence[int]) -> float:
    """Sum of -log2 of the probability that row i of `logits` gives `tokens[i]`."""
    import numpy as np

    wide = logits.astype(np.float64)
    top = wide.max(axis=-1)
    log_total = top + np.log(np.exp(wide - top[:, None]).sum(axis=-1))
    chosen = np.take_along_axis(wide, np.asarray(tokens)[:, None], axis=-1)[:, 0]
    return float((log_total - chosen).sum() / np.log(2.0))


def windows(length: int, longest: int) -> list[Window]:
    """Windows that cover tokens 1 to `length`, each counted once.

    In: length 10, longest 4. Out (start, first, end): (0, 1, 4), (2, 4, 6), (4, 6, 8), (6, 8, 10).
    """
    found = [Window(0, 1, min(length, longest))] if length > 1 else []
    while found and found[-1].end < length:
        first = found[-1].end
        start = first - longest // 2
        found.append(Window(start, first, min(start + longest, length)))
    return found


def document(scores: Sequence[FileScore]) -> dict[str, object]:
    """The JSON object of a run."""
    total = sum(score.bits for score in scores) / sum(score.size for score in scores)
    return {
        "files": [
            {"name": score.name, "bytes": score.size, "bits_per_byte": score.bits_per_byte}
            for score in scores
        ],
        "bits_per_byte": total,
    }


def make_progress() -> Progress:
    """A bar on standard error; nothing where that is not a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,  # it would end up on standard error
        disable=not console.is_terminal,
    )
