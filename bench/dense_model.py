"""Perplexity of a dense model against how many positions its layers may attend to.

Texts of the model's whole context, teacher forced: dense, as it was trained; the best K positions
by the indexers that `dhisparse_jax.models.train_indexer` fitted; and, for comparison, the K newest
positions, of which four are the first ones of the text. All of it through plain masked attention. A
check goes through the hierarchy itself: the last tokens of a shorter text in decode steps, under
every policy, whose logits must be the same bit for bit, and those of the masked attention but for
rounding.
"""

import hashlib
import math
import time
from json import loads as parse
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench.record import RESULTS, environment, save, write
from dhisparse_jax import HierarchyConfig, Policy, plugin
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.llama.decode import feeder, geometry, read_prompt
from dhisparse_jax.models.llama.indexers import BUNDLED, FittedIndexers, load_indexers
from dhisparse_jax.models.llama.load import load_gguf, packaged
from dhisparse_jax.models.llama.model import LlamaModel
from dhisparse_jax.models.params import flatten, params_of
from dhisparse_jax.models.train_indexer.evaluate import SINKS, Mode, look_for, text_losses
from dhisparse_jax.models.train_indexer.texts import load_texts

Figures = dict[str, Any]

CHECKED, DECODED, QUERIES = 2048, 128, 8
"""Of the check: tokens of its text, how many of them go in decode steps, and tokens of a step."""


def main(
    gguf: Annotated[Path | None, typer.Option(help="The model; SmolLM2 if left out.")] = None,
    indexers: Annotated[Path, typer.Option(help="Folder of indexers.")] = BUNDLED["smollm2"],
    counts: Annotated[str, typer.Option(help="Positions that a query attends to.")] = "512,256,128",
    texts: Annotated[str, typer.Option(help="Left-out texts, by name; all: every one.")] = "all",
    length: Annotated[int | None, typer.Option(help="Tokens of a text; None: all context.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the model's products.")] = "float32",
    json: Annotated[Path | None, typer.Option(help="Where to write; gone on with if there.")] = (
        RESULTS / "cpu" / "dense_model.json"
    ),
) -> None:
    """Measure a model with its indexers on left-out texts."""
    path = gguf or packaged("smollm2")
    loaded = load_gguf(path, dtype)
    model, fitted = loaded.model, load_indexers(indexers, loaded.model.config)
    size = length or model.config.context
    _, left_out, sources = load_texts(loaded.words, count=0, length=size, seed=0)
    names = list(left_out) if texts == "all" else texts.split(",")
    if unknown := [name for name in names if name not in left_out]:
        raise UserError(
            f"no left-out text {unknown[0]!r} of {size} tokens; there are {[*left_out]}"
        )
    sizes = [int(count) for count in counts.split(",")]
    settings = {
        "model": path.name,
        "indexers": _digest(fitted),
        "sources": sources,
        "length": size,
        "dtype": dtype,
        "sinks": SINKS,
    }
    before = _before(json, settings)
    figures: Figures = before.get("texts", {})
    document: Figures = {"bench": "dense_model", **environment(), **settings, "texts": figures}
    for name in names:
        for mode, count in _cells(sizes):
            _measure(model, fitted, left_out[name], figures.setdefault(name, {}), mode, count)
            save(document, json)
    document["mean"] = means(figures)
    document["hierarchy"] = before.get("hierarchy") or check(
        model, fitted, left_out[names[0]][:CHECKED], min(sizes), DECODED
    )
    Console(stderr=True).print(_table(document["mean"]))
    write(document, json)


def _cells(counts: list[int]) -> list[tuple[Mode, int]]:
    sparse: list[tuple[Mode, int]] = [
        (mode, count) for count in counts for mode in ("indexer", "window")
    ]
    return [("dense", 0), *sparse]


def _digest(fitted: FittedIndexers) -> str:
    """SHA-256 of the weights of indexers."""
    weights = sorted(flatten(params_of(fitted)).items())
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for _, x in weights)).hexdigest()


def _before(json: Path | None, settings: Figures) -> Figures:
    """What an earlier run with the same settings has written."""
    if json is None or not json.is_file():
        return {}
    old = parse(json.read_text())
    return old if all(old.get(name) == each for name, each in settings.items()) else {}


def _measure(
    model: LlamaModel,
    fitted: FittedIndexers,
    tokens: np.ndarray,
    done: Figures,
    mode: Mode,
    count: int,
) -> None:
    """One text in one way: nats per token, of all and of the quarters of the text."""
    label = mode if mode == "dense" else f"{mode} {count}"
    if label in done:
        return
    start = time.monotonic()
    look = look_for(mode, count, len(tokens), fitted)
    losses = np.asarray(text_losses(model, jnp.asarray(tokens), look), np.float64)
    done[label] = {
        "nats": float(losses.mean()),
        "quarters": [float(part.mean()) for part in np.array_split(losses, 4)],
        "seconds": round(time.monotonic() - start, 1),
    }
    Console(stderr=True).print(f"{label}: {done[label]}")


def means(figures: Figures) -> Figures:
    """Perplexity by way, over all tokens of all texts, and over the last halves of the texts."""
    ways = {
        label: [each[label] for each in figures.values()] for label in next(iter(figures.values()))
    }
    return {
        label: {
            "perplexity": math.exp(np.mean([each["nats"] for each in found])),
            "perplexity_last_half": math.exp(np.mean([each["quarters"][2:] for each in found])),
        }
        for label, found in ways.items()
    }


def check(
    model: LlamaModel, fitted: FittedIndexers, tokens: np.ndarray, count: int, last: int
) -> Figures:
    """The end of a text through the hierarchy, under several policies.

    The prompt's rows come from the masked attention, whose logits of the other tokens those of the
    decode steps are compared with.
    """
    prompt = read_prompt(model, fitted, jnp.asarray(tokens), count)
    wanted = np.asarray(model.logits(prompt.hidden[-last:]))
    found: dict[str, np.ndarray] = {}
    fetched: dict[str, int] = {}
    for policy in Policy:
        cfg = HierarchyConfig(
            geometry=geometry(model, fitted, count),
            policy=policy,
            requests=1,
            capacity=len(tokens),
            hot_rows=2 * count,
            queries=QUERIES,
        )
        kept = len(tokens) - last
        rows = [(keys[:kept], values[:kept]) for keys, values in prompt.rows]
        admit = jax.jit(plugin.admit, static_argnums=1, donate_argnums=0)
        state = admit(plugin.init(cfg), cfg, 0, rows, [keys[:kept] for keys in prompt.keys])
        feed, total = feeder(model, fitted, cfg), 0
        logits: list[np.ndarray] = []
        for start in range(kept, len(tokens), QUERIES):
            state, told = feed(state, jnp.asarray(tokens[None, start : start + QUERIES]))
            logits.append(np.asarray(told[0]))
            total += int(state.counts.fetched.sum())
        found[policy.value], fetched[policy.value] = np.concatenate(logits), total
    first = found[Policy.RESIDENT.value]
    return {
        "count": count,
        "text": len(tokens),
        "decoded": last,
        "queries": QUERIES,
        "hot_rows": 2 * count,
        "fetched_records": fetched,
        "policies_equal_bit_for_bit": all((each == first).all() for each in found.values()),
        "largest_logit": float(np.abs(wanted).max()),
        "largest_difference": float(np.abs(first - wanted).max()),
        "same_best_token": float((first.argmax(-1) == wanted.argmax(-1)).mean()),
    }


def _table(ways: Figures) -> Table:
    table = Table(title="Perplexity of left-out texts")
    for name in ("attends to", "perplexity", "of the last half"):
        table.add_column(name, justify="right")
    for label, each in ways.items():
        table.add_row(label, f"{each['perplexity']:.3f}", f"{each['perplexity_last_half']:.3f}")
    return table


if __name__ == "__main__":
    typer.run(main)
