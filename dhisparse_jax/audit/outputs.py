"""E1: attended values of every layer and logits under a policy, bit for bit those of `resident`."""

import numpy as np
from jaxtyping import Bool, Shaped, UInt8

from dhisparse_jax.audit.findings import Difference, Level
from dhisparse_jax.audit.lockstep import Pair


def compare_outputs(pair: Pair, level: Level) -> None:
    """Compare what a step computed for the tokens that it accepted."""
    queries = pair.audited.logits.shape[1]
    counts = np.arange(queries) < pair.accepted[:, None]
    found: list[Difference] = []
    layer = 0
    for mine, reference in zip(pair.audited.seen, pair.resident.seen, strict=True):
        for attended, wanted in zip(mine.attended, reference.attended, strict=True):
            found += _differences(pair, counts, attended, wanted, layer)
            level.counts["attended values"] += int(counts.sum()) * _width(attended)
            layer += 1
    found += _differences(pair, counts, pair.audited.logits, pair.resident.logits, None)
    level.counts["logits"] += int(counts.sum()) * _width(pair.audited.logits)
    level.counts["tokens"] += int(counts.sum())
    level.add(found)


def _differences(
    pair: Pair,
    counts: Bool[np.ndarray, "R T"],
    mine: Shaped[np.ndarray, "R T *_"],
    wanted: Shaped[np.ndarray, "R T *_"],
    layer: int | None,
) -> list[Difference]:
    differ = counts & unequal(mine, wanted)
    what = "the logits differ" if layer is None else "what attention gives differs"
    return [
        Difference(
            what,
            request=pair.names[row],
            step=pair.number,
            layer=layer,
            position=int(pair.start[row]) + query,
            detail=f"by up to {_most(mine[row, query], wanted[row, query]):.3g}",
        )
        for row, query in np.argwhere(differ).tolist()
    ]


def unequal(
    one: Shaped[np.ndarray, "R T *_"], other: Shaped[np.ndarray, "R T *_"]
) -> Bool[np.ndarray, "R T"]:
    """Which entries of the first two axes differ in any bit."""
    return (_bytes(one) != _bytes(other)).any(axis=-1)


def _bytes(array: Shaped[np.ndarray, "R T *_"]) -> UInt8[np.ndarray, "R T bytes"]:
    size = array.dtype.itemsize * _width(array)
    return np.ascontiguousarray(array).view(np.uint8).reshape(*array.shape[:2], size)


def _most(one: Shaped[np.ndarray, "*n"], other: Shaped[np.ndarray, "*n"]) -> float:
    return float(np.abs(one.astype(np.float64) - other.astype(np.float64)).max())


def _width(array: Shaped[np.ndarray, "R T *_"]) -> int:
    return int(np.prod(array.shape[2:]))
