"""`dhisparse evaluate`: bits per byte of files, with the history in the hierarchy."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from dhisparse_jax.cli import options as opt
from dhisparse_jax.cli.prompts import Prompt, read_prompts
from dhisparse_jax.cli.report import json_line
from dhisparse_jax.errors import UserError

if TYPE_CHECKING:
    from dhisparse_jax.models.registry import LoadedModel

Score = Callable[[Sequence[int]], Sequence[float]]


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


def evaluate(  # one parameter an option
    files: opt.Files,
    model: opt.Model = opt.BUNDLED_MODEL,
    dtype: opt.Dtype = opt.DtypeName.FLOAT32,
    policy: opt.Policy = opt.PolicyName.ADAPTIVE,
    hot_rows: opt.HotRows = None,
) -> None:
    """Bits per byte of each file: how well the model predicts it.

    Every token is predicted from all that stand before it. The first one of a file, which has
    nothing before it, counts as log2 of the vocabulary's size. A file longer than the context is
    read in windows of the context's length that overlap by half; a token counts once, in the first
    window that holds it, so it is predicted from half a context at least. The total is all bits over all bytes.

    The last line of standard output is one JSON object:
    {"files": [{"name", "bytes", "bits_per_byte"}], "bits_per_byte"}.
    """
    prompts = read_prompts(files)
    run(prompts, model, dtype, opt.HierarchyOptions(policy, hot_rows, 1))


def run(
    prompts: Sequence[Prompt], model: str, dtype: opt.DtypeName, hierarchy: opt.HierarchyOptions
) -> None:
    """Score the files one after the other, print a line for each, then the JSON object."""
    from dhisparse_jax.cli.session import load_model, make_engine

    loaded = load_model(model, dtype)
    encoded = [encode(loaded, prompt) for prompt in prompts]
    positions = min(max(len(tokens) for tokens in encoded), loaded.context)
    engine = make_engine(loaded, hierarchy, requests=1, positions=positions)
    scores = []
    with make_progress() as progress:
        for prompt, tokens in zip(prompts, encoded, strict=True):
            task = progress.add_task(prompt.name, total=len(tokens))
            bits = file_bits(
                tokens,
                engine.score,
                loaded,
                lambda done, task=task: progress.update(task, completed=done),
            )
            progress.remove_task(task)
            scores.append(FileScore(prompt.name, len(prompt.data), bits))
            typer.echo(f"{scores[-1].bits_per_byte:8.4f} bits per byte  {prompt.name}")
    typer.echo(json_line(document(scores)))


def encode(loaded: "LoadedModel", prompt: Prompt) -> tuple[int, ...]:
    """Tokens of a file. Raises UserError where the vocabulary cannot hold it, or it has none."""
    try:
        tokens = loaded.tokenizer.encode(prompt.data)
    except UserError as error:
        raise UserError(f"{prompt.name}: {error}") from error
    if not tokens:
        raise UserError(f"{prompt.name} gives no tokens; at least one is needed")
    return tokens


def file_bits(
    tokens: Sequence[int], score: Score, loaded: "LoadedModel", progress: Callable[[int], None]
) -> float:
    """Total bits of a file.

    Args:
      tokens: the file's, one or more.
      score: log2 of the probability of each token but the first, given those before it.
      loaded: gives the context and the size of the vocabulary.
      progress: told how many tokens are done.
    """
    bits = math.log2(loaded.model.vocab_size)
    for window in windows(len(tokens), loaded.context):
        log_probabilities = score(tokens[window.start : window.end])
        # Entry i is about token start + 1 + i.
        bits -= math.fsum(log_probabilities[window.first - window.start - 1 :])
        progress(window.end)
    return bits


def windows(length: int, context: int) -> list[Window]:
    """Windows that cover tokens 1 to `length`, each counted once.

    In: length 10, context 4. Out (start, first, end): (0, 1, 4), (2, 4, 6), (4, 6, 8), (6, 8, 10).
    """
    found = [Window(0, 1, min(length, context))] if length > 1 else []
    while found and found[-1].end < length:
        first = found[-1].end
        start = first - context // 2
        found.append(Window(start, first, min(start + context, length)))
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
        disable=not console.is_terminal,
    )
