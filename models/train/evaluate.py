"""Bits per byte on the left-out modules, for the model and for a general-purpose compressor."""

import lzma
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.models.glm.dense import Mode, attend_for, run_layers
from dhisparse_jax.models.params import Nested, abstract_params, build_model
from dhisparse_jax.models.train.corpus import SEPARATOR
from dhisparse_jax.models.train.losses import token_losses

EvaluateBatch = Callable[..., jax.Array]
"""From weights, inputs, targets and score masks to the nats of each window."""


class Windows(NamedTuple):
    """Evaluation files cut into overlapping windows; every byte is scored in exactly one.

    Attributes:
        inputs: What the model reads. Padded with separators, also by whole windows.
        targets: The byte after each input.
        scored: Which targets count here.
        file: Number of the file that a window belongs to.
    """

    inputs: Int[np.ndarray, "windows context"]
    targets: Int[np.ndarray, "windows context"]
    scored: Bool[np.ndarray, "windows context"]
    file: Int[np.ndarray, " windows"]


def cut_windows(
    files: Mapping[str, bytes], *, context: int, batch: int, limit: int | None = None
) -> Windows:
    """Cuts each file into windows that overlap by half.

    So a byte is predicted from at least `context / 2` bytes before it, unless its file starts
    nearer; never from another file.

    Args:
        files: Name to content.
        context: Positions per window.
        batch: The number of windows is made a multiple of this.
        limit: Bytes taken from each file.
    """
    rows: list[tuple[np.ndarray, np.ndarray, np.ndarray, int]] = []
    for number, text in enumerate(files.values()):
        stream = np.frombuffer(bytes([SEPARATOR]) + text[:limit], np.uint8).astype(np.int32)
        done, last = 0, len(stream) - 1
        while done < last:
            start = max(0, min(done - context // 2, last - context))
            piece = np.zeros(context + 1, np.int32)
            taken = stream[start : start + context + 1]
            piece[: len(taken)] = taken
            target = start + np.arange(context)
            rows.append((piece[:-1], piece[1:], (target >= done) & (target < last), number))
            done = min(start + context, last)
    empty = np.zeros(context, np.int32)
    rows.extend([(empty, empty, np.zeros(context, np.bool_), 0)] * (-len(rows) % batch))
    inputs, targets, scored, file = zip(*rows, strict=True)
    return Windows(np.stack(inputs), np.stack(targets), np.stack(scored), np.array(file, np.int32))


def window_nats(
    config: GlmConfig,
    params: Nested,
    inputs: Int[Array, "batch context"],
    targets: Int[Array, "batch context"],
    scored: Bool[Array, "batch context"],
    *,
    mode: Mode,
    dtype: jnp.dtype,
    chunk: int,
) -> Float[Array, " batch"]:
    """Cross-entropy of the scored targets of each window, in nats."""
    model = build_model(config, params, dtype)
    features = run_layers(model, inputs, attend_for(model, mode, chunk))
    losses, _ = token_losses(model.logits(features.h), targets)
    return jnp.sum(jnp.where(scored, losses, 0.0), axis=-1)


class Evaluator:
    """Measures bits per byte at one context length, in any mode."""

    def __init__(
        self,
        config: GlmConfig,
        files: Mapping[str, bytes],
        *,
        context: int,
        batch: int,
        dtype: jnp.dtype,
        limit: int | None = None,
        chunk: int = 512,
    ) -> None:
        self._names = tuple(files)
        self._sizes = np.array([len(text[:limit]) for text in files.values()])
        self._windows = cut_windows(files, context=context, batch=batch, limit=limit)
        self._batch = batch
        self._params = abstract_params(config)
        self._function = partial(window_nats, config, dtype=dtype, chunk=chunk)

    def compile(self, mode: Mode) -> EvaluateBatch:
        """Compiles the evaluation of one mode, from shapes alone; may run in another thread."""
        return (
            jax.jit(partial(self._function, mode=mode))
            .lower(self._params, *self._slice(0))
            .compile()
        )

    def bits_per_byte(self, params: Nested, evaluate: EvaluateBatch) -> dict[str, float]:
        """Figures of each file, and under "all" of the files together.

        Args:
            params: Weights with the dtypes that the model keeps.
            evaluate: What `compile` returned.
        """
        starts = range(0, len(self._windows.file), self._batch)
        pending = [evaluate(params, *self._slice(start)) for start in starts]
        nats = np.concatenate([np.asarray(part) for part in pending])
        bits = np.bincount(self._windows.file, nats, len(self._names)) / math.log(2)
        each = {
            name: float(bit / size)
            for name, bit, size in zip(self._names, bits, self._sizes, strict=True)
        }
        return {"all": float(bits.sum() / self._sizes.sum()), **each}

    def _slice(self, start: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inputs, targets and score masks of one batch."""
        inputs, targets, scored, _ = self._windows
        batch = slice(start, start + self._batch)
        return inputs[batch], targets[batch], scored[batch]


def xz_bits_per_byte(files: Mapping[str, bytes]) -> dict[str, float]:
    """What `xz -9` needs: "concatenated" is one archive of all files, "per_file" one for each."""
    total = sum(len(text) for text in files.values())

    def compressed(text: bytes) -> int:
        return len(lzma.compress(text, preset=9))

    return {
        "concatenated": 8 * compressed(b"".join(files.values())) / total,
        "per_file": 8 * sum(compressed(text) for text in files.values()) / total,
    }
