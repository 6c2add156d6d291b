"""What the formats of history cost: bits per byte of the bundled model with each of them.

Every combination reads the first bytes of each left-out text through the engine's own path, all of
it in prefill, which stores and attends as decode does. Beside it, apart from the model's answer:
how far the rows and index keys of the float32 run are from what each format makes of them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import typer
from jaxtyping import Float
from rich.console import Console
from rich.table import Table

from bench.record import RESULTS, environment, write
from dhisparse_jax.cli.evaluate import bits_of
from dhisparse_jax.config import HierarchyConfig, Policy, RowFormat
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.forced import forced_logits
from dhisparse_jax.engine.request import Request
from dhisparse_jax.engine.session import Session
from dhisparse_jax.hierarchy.formats import stored_keys, stored_rows
from dhisparse_jax.models import registry
from dhisparse_jax.models.hadamard import rotate_hadamard
from dhisparse_jax.models.registry import LoadedModel
from dhisparse_jax.models.train.corpus import load_evaluation
from pallas_kernels.common.rows import unpack
from pallas_kernels.common.scaled_rows import ScaledRow, decode
from pallas_kernels.index_scores.types import ScaledKeys


class Formats(NamedTuple):
    """Of the rows, and of the index keys."""

    rows: str
    keys: str


EVERY = (
    Formats("float32", "float32"),
    Formats("bfloat16", "bfloat16"),
    Formats("fp8", "float32"),
    Formats("float32", "fp8"),
    Formats("fp8", "fp8"),
)
"""The first is what the others are compared with."""

NEW_TOKENS = 16
"""That a request may write, so that it is not done before its history is copied."""


def main(
    text_bytes: Annotated[int, typer.Option(help="Bytes of each text.")] = 4096,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = (
        RESULTS / "cpu" / "formats.json"
    ),
) -> None:
    """Measure the bundled model with its history in each format, in float32 otherwise."""
    texts = [text[:text_bytes] for text in load_evaluation().values()]
    results: list[dict[str, Any]] = []
    exact: Session | None = None
    for formats in EVERY:
        loaded = registry.load("tiny", kv_format=formats.rows, index_format=formats.keys)
        engine = make_engine(loaded, text_bytes)
        exact = exact or history(engine, loaded, texts[0])
        results.append(
            {
                "rows": formats.rows,
                "index_keys": formats.keys,
                "bytes_per_token": loaded.model.geometry.position_bytes,
                "bits_per_byte": bits_per_byte(engine, loaded, texts),
                "row_error": row_error(exact, loaded),
                "key_error": key_error(exact, loaded, rotated=formats.keys == "fp8"),
            }
        )
    Console(stderr=True).print(_table(results))
    sizes = {"texts": len(texts), "text_bytes": text_bytes}
    write({"bench": "formats", **environment(), **sizes, "formats": results}, json)


def make_engine(loaded: LoadedModel, text_bytes: int) -> Engine:
    """Room for one text with its start token, and for some to write."""
    geometry = loaded.model.geometry
    cfg = HierarchyConfig(
        geometry=geometry,
        policy=Policy.FIXED,
        requests=1,
        capacity=text_bytes + 1 + NEW_TOKENS,
        hot_rows=4 * geometry.top_k,
    )
    return Engine(loaded.model, loaded.params, cfg)


def bits_per_byte(engine: Engine, loaded: LoadedModel, texts: list[bytes]) -> float:
    """All bits of all texts over all their bytes; the start token predicts the first byte."""
    bits = 0.0
    for text in texts:
        tokens = loaded.tokenizer.encode(text)
        pieces = forced_logits(engine, tokens, len(tokens))
        logits = np.concatenate([piece for piece in pieces if isinstance(piece, np.ndarray)])
        bits += bits_of(logits[:-1], tokens[1:])
    return bits / sum(map(len, texts))


def history(engine: Engine, loaded: LoadedModel, text: bytes) -> Session:
    """The rows and index keys of a text."""
    request = Request(name="text", prompt=loaded.tokenizer.encode(text), max_new_tokens=NEW_TOKENS)
    number = engine.submit(request)
    list(engine.advance())
    session = engine.save(number)
    engine.cancel(number)
    while not engine.idle:
        list(engine.advance())
    return session


def row_error(exact: Session, loaded: LoadedModel) -> float:
    """Root of the mean square of what a row format loses of the latents, over that of them."""
    geometry = loaded.model.geometry
    row, width = geometry.row, geometry.row.width
    records = zip(exact.records, geometry.layers_per_pool, strict=True)
    rows = [words[:, : layers * width].reshape(-1, width) for words, layers in records]
    given = unpack(jnp.asarray(np.concatenate(rows)), jnp.float32)
    return relative_error(given, lambda values: kept_rows(row, values), row.value_width)


def kept_rows(row: RowFormat, values: Float[np.ndarray, "n width"]) -> Float[np.ndarray, "n width"]:
    """The numbers that stored rows stand for."""
    words = stored_rows(row, jnp.asarray(values))
    if isinstance(row.dtype, ScaledRow):
        return np.asarray(decode(words, row.dtype))
    return np.asarray(unpack(words, row.dtype).astype(jnp.float32))


def key_error(exact: Session, loaded: LoadedModel, *, rotated: bool) -> float:
    """The same of the index keys, which fp8 rotates first."""
    geometry = loaded.model.geometry
    given = jnp.asarray(np.concatenate([np.asarray(keys) for keys in exact.keys]))
    given = rotate_hadamard(given) if rotated else given

    def kept(values: Float[np.ndarray, "n index"]) -> Float[np.ndarray, "n index"]:
        keys = stored_keys(geometry, jnp.asarray(values))
        if isinstance(keys, ScaledKeys):
            return np.asarray(keys.numbers.astype(jnp.float32) * keys.scales[:, None])
        return np.asarray(keys.astype(jnp.float32))

    return relative_error(given, kept, given.shape[1])


def relative_error(
    given: Any,  # noqa: ANN401  # an array of JAX or of NumPy
    kept: Callable[[np.ndarray], np.ndarray],
    width: int,
) -> float:
    """Of the first `width` numbers of all vectors together."""
    values = np.asarray(given)
    off = (kept(values) - values)[:, :width].astype(np.float64)
    return float(np.sqrt((off**2).sum() / (values[:, :width].astype(np.float64) ** 2).sum()))


def _table(results: list[dict[str, Any]]) -> Table:
    table = Table(title="Formats of history, bundled model")
    for name in ("rows", "index keys", "bytes per token", "bits per byte", "row error"):
        table.add_column(name, justify="right")
    table.add_column("key error", justify="right")
    for item in results:
        table.add_row(
            item["rows"],
            item["index_keys"],
            f"{item['bytes_per_token']:,}",
            f"{item['bits_per_byte']:.4f}",
            f"{item['row_error']:.1e}",
            f"{item['key_error']:.1e}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
