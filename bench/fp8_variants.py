"""Products with fp8 matrices, few rows each: XLA's and the kernel's tilings, at GLM-5.3's shapes.

    python -m bench.fp8_variants --json OUT

Each variant is compared with the reference first. The floor is one read of the numbers.
"""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jaxtyping import Array

from bench.record import environment, save, write
from bench.shard_weights import random_like
from dhisparse_jax.engine.rates import measure_floors
from dhisparse_jax.engine.timing import measure
from pallas_kernels.fp8_products import reference, triton
from pallas_kernels.fp8_products.triton import Tuning

SHAPES = {
    "gate_up": (32, 4096, 6144),
    "down": (32, 6144, 2048),
    "latents": (1, 2624, 6144),
    "queries": (1, 16384, 2048),
    "to_latent": (64, 512, 192),
    "from_latent": (64, 256, 512),
    "out": (1, 6144, 16384),
    "shared gate_up": (1, 4096, 6144),
}
TUNINGS = [
    Tuning(columns=columns, depth=depth, stages=stages, warps=warps)
    for columns, depth, stages, warps in (
        (64, 128, 3, 4),
        (64, 128, 4, 4),
        (64, 128, 6, 4),
        (128, 128, 3, 4),
        (128, 128, 4, 4),
        (128, 128, 4, 8),
        (64, 256, 3, 4),
        (64, 256, 4, 4),
        (128, 64, 6, 4),
        (64, 512, 2, 4),
    )
]

Call = Callable[[Array, Array, Array], Array]


def main(
    shapes: Annotated[str, typer.Option(help="Comma-separated.")] = "gate_up,down",
    rows: Annotated[str, typer.Option(help="Rows of each matrix.")] = "16,64",
    runs: Annotated[int, typer.Option(help="Runs of each.")] = 5,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Time every variant at every shape."""
    floors = measure_floors(5)
    document: dict[str, Any] = {"bench": "fp8_variants", **environment(), "rows": []}
    for shape, count in itertools.product(shapes.split(","), map(int, rows.split(","))):
        floor = np.prod(SHAPES[shape]) / floors.hbm_gbps / 1e3
        for label, call in _variants():
            try:
                found = _time(call, SHAPES[shape], count, runs)
            except Exception as error:  # whatever a compiler says
                found = {"reason": str(error).splitlines()[0][:120]}
            row = {"shape": shape, "rows": count, "variant": label, "floor_us": floor, **found}
            document["rows"].append(row)
            typer.echo(f"{shape} {count} {label}: {found} floor {floor:.0f}", err=True)
            save(document, json)
    write(document, json)


def _variants() -> list[tuple[str, Call]]:
    kernel = [(str(sizes), partial(triton.products, tuning=sizes)) for sizes in TUNINGS]
    return [("xla", reference.products), *kernel]


def _time(call: Call, shape: tuple[int, int, int], rows: int, runs: int) -> dict[str, float]:
    """Microseconds and the error relative to the largest result."""
    matrices, channels, depth = shape
    shapes = (
        jax.ShapeDtypeStruct((matrices, channels, depth), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((matrices, rows, depth), jnp.bfloat16),
    )
    numbers, x = random_like(shapes, 0)
    scale = jnp.full((matrices, channels), depth**-0.5, jnp.float32)
    few = slice(0, 2)
    exact = np.asarray(reference.products(x[few], numbers[few], scale[few]), np.float32)
    mine = np.asarray(jax.jit(call)(x[few], numbers[few], scale[few]), np.float32)

    def step(state: Array, operands: tuple[Array, Array], _: int) -> tuple[Array, Array]:
        out = call(state, *operands)
        # The next call reads what this one wrote, so that none is left out or moved.
        return state + out[..., :1] * 0, out[:, 0, 0]

    timing, _, _ = measure(step, x, (numbers, scale), calls=4, runs=runs)
    return {"us": timing.median, "error": float(np.abs(mine - exact).max() / np.abs(exact).max())}


if __name__ == "__main__":
    typer.run(main)
