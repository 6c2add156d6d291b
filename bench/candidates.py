"""A selection out of candidate blocks, by their keys and by all keys: `python -m bench.candidates`.

With the sizes of DeepSeek-V4.1, and queries that follow each other: each has half of its direction
from the one before. Both forms must select the same records, but for equal scores in the last
digit, which are counted.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jaxtyping import Array

from bench.record import environment, write
from dhisparse_jax.configs import DEEPSEEK_V4_1_FLASH
from dhisparse_jax.hierarchy.candidates import best_candidates, candidate_blocks, inside
from dhisparse_jax.hierarchy.formats import stored_keys
from dhisparse_jax.models.deepseek_v41.decode import geometry_of
from pallas_kernels.index_scores.api import index_scores
from pallas_kernels.top_k.api import top_k

GEOMETRY = geometry_of(DEEPSEEK_V4_1_FLASH, "bfloat16")
HEADS, RUNS = DEEPSEEK_V4_1_FLASH.index_heads, 5


def main(
    records: Annotated[str, typer.Option(help="Records of a history.")] = "100352,401408",
    queries: Annotated[str, typer.Option(help="Queries of a step.")] = "1,4",
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Time both forms for one request, with keys as V4.1 keeps them."""
    rows = [_row(int(c), int(t)) for c in records.split(",") for t in queries.split(",")]
    write({"bench": "candidates", **environment(), "keys": "fp4", "rows": rows}, json)


def _row(records: int, queries: int) -> dict[str, Any]:
    rule = GEOMETRY.candidates_of(GEOMETRY.pools - 1)
    assert rule is not None  # it is the pool with candidates
    keys = stored_keys(GEOMETRY, _draw(0, 1, records, GEOMETRY.index_width))
    visible = jnp.full((1, queries), records, jnp.int32)
    first, again = _queries(1, queries), _queries(2, queries)
    k = GEOMETRY.top_k
    blocks = candidate_blocks(rule, jax.jit(index_scores)(*first, keys, visible), visible)
    gathered = jax.jit(lambda *given: best_candidates(rule, k, *given))
    whole = jax.jit(lambda *given: top_k(inside(rule, index_scores(*given[:-1]), given[-1]), k))
    given = (*again, keys, visible, blocks)
    selected = [np.asarray(form(*given)) for form in (gathered, whole)]
    return {
        "records": records,
        "queries": queries,
        "candidates": len(np.unique(blocks)) * rule.block,
        "ms_by_candidates": _milliseconds(gathered, given),
        "ms_by_all": _milliseconds(whole, given),
        "records_that_differ": int((selected[0] != selected[1]).sum()),
    }


def _queries(seed: int, count: int) -> tuple[Array, Array]:
    fresh = _draw(seed, 1, count, HEADS, GEOMETRY.index_width)
    for number in range(1, count):
        follows = 0.9 * fresh[:, number - 1] + 0.45 * fresh[:, number]
        fresh = fresh.at[:, number].set(follows)
    weights = jnp.broadcast_to(_draw(seed + 10, 1, 1, HEADS), (1, count, HEADS))
    return fresh, weights


def _draw(seed: int, *shape: int) -> Array:
    return jax.random.normal(jax.random.key(seed), shape)


def _milliseconds(form: Callable[..., Array], given: tuple[Any, ...]) -> float:
    """The fastest of some runs: others may compute here too."""
    times = []
    for _ in range(RUNS):
        begin = time.monotonic()
        jax.block_until_ready(form(*given))
        times.append(time.monotonic() - begin)
    return round(1e3 * min(times), 2)


if __name__ == "__main__":
    typer.run(main)
