"""The run: texts are captured once, then every indexer is updated in turn, with saves between."""

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dhisparse_jax.models.llama.load import Loaded
from dhisparse_jax.models.train_indexer.capture import (
    Captured,
    capture,
    draw_positions,
    load_captured,
    save_captured,
)
from dhisparse_jax.models.train_indexer.config import FitConfig
from dhisparse_jax.models.train_indexer.evaluate import SINKS
from dhisparse_jax.models.train_indexer.record import FitRecord, resume_run, save_run
from dhisparse_jax.models.train_indexer.step import (
    Batch,
    FitState,
    Quality,
    fresh_state,
    judge,
    rate_at,
    update,
)
from dhisparse_jax.models.train_indexer.texts import Texts, Tokens

log = logging.getLogger(__name__)

_update = jax.jit(update, static_argnums=0, donate_argnums=1)
_judge = jax.jit(judge, static_argnums=(0, 3))


@dataclass
class Fit:
    """One fit.

    Attributes:
        config: Settings.
        loaded: The frozen model.
        name: Its file.
        texts: What to fit on, and what to judge by.
        out: Folder of the run; one that is there is gone on with.
    """

    config: FitConfig
    loaded: Loaded
    name: str
    texts: Texts
    out: Path
    _captured: list[Captured] = field(init=False)

    def run(self) -> FitRecord:
        """Captures, fits, judges and saves."""
        config, start = self.config, time.monotonic()
        groups = range(len(config.fitted.layers_per_group))
        fresh = [fresh_state(config, config.seed + group) for group in groups]
        record = FitRecord.start(config, self.name, self.texts.digest)
        states, record = resume_run(self.out, record, fresh)
        record.parameters = sum(x.size for x in jax.tree.leaves([s.params for s in states]))
        if record.steps:
            log.info("goes on from step %d", record.steps)
        rng = np.random.default_rng(config.seed)
        self._captured = [
            self._capture(str(number), tokens, rng)
            for number, tokens in enumerate(self.texts.train)
        ]
        record.seconds, start = record.seconds + time.monotonic() - start, time.monotonic()
        while record.steps < config.steps:
            count = min(config.save_steps, config.steps - record.steps)
            means = self._updates(states, record.steps, count)
            record.steps += count
            spent, start = time.monotonic() - start, time.monotonic()
            record.seconds += spent
            record.curve.append({"step": record.steps, "divergence": means})
            save_run(self.out, config, states, record)
            self._report(record, means, spent / count)
        record.left_out = self._judge(states)
        record.seconds += time.monotonic() - start
        save_run(self.out, config, states, record)
        return record

    def _capture(self, name: str, tokens: Tokens, rng: np.random.Generator) -> Captured:
        """What the model shows of a text; from the file of an earlier run if there is one."""
        positions = draw_positions(len(tokens), self.config.queries, rng)
        path = self.out / "captured" / f"{name}.npz"
        if not path.is_file():
            start = time.monotonic()
            config = self.config.fitted
            save_captured(path, capture(self.loaded.model, config, tokens, positions))
            log.info("captured text %s in %.0f s", name, time.monotonic() - start)
        return load_captured(path)

    def _updates(self, states: list[FitState], done: int, count: int) -> list[float]:
        """Some steps of every indexer, in place; mean divergence of each group."""
        told: list[list[jax.Array]] = []
        for step in range(done, done + count):
            rng = np.random.default_rng((self.config.seed, step))
            text = self._captured[rng.integers(len(self._captured))]
            asked = np.sort(rng.choice(len(text.positions), self.config.batch, replace=False))
            rate = jnp.float32(rate_at(self.config, step))
            losses: list[jax.Array] = []
            for group, state in enumerate(states):
                batch = _batch(text, group, asked)
                states[group], loss = _update(self.config, state, batch, rate)
                losses.append(loss)
            told.append(losses)
        return [round(float(mean), 4) for mean in np.mean(jax.device_get(told), axis=0)]

    def _report(self, record: FitRecord, means: list[float], seconds: float) -> None:
        """One line about how it goes, at so many seconds a step."""
        log.info(
            "%3.0f %%  step %4d  divergence %.4f (worst group %.4f)  eta %.0f s",
            100 * record.steps / self.config.steps,
            record.steps,
            np.mean(means),
            np.max(means),
            seconds * (self.config.steps - record.steps),
        )

    def _judge(self, states: list[FitState]) -> dict[str, Any]:
        """How each group does on the first left-out text."""
        name, tokens = next(iter(self.texts.left_out.items()))
        text = self._capture(name, tokens, np.random.default_rng(self.config.seed))
        every = np.arange(len(text.positions))
        groups = [
            _judge(self.config, state.params, _batch(text, group, every), SINKS)
            for group, state in enumerate(states)
        ]
        mean = jax.tree.map(lambda *parts: sum(parts) / len(parts), *groups)
        log.info("%s, left out: %s", name, _rounded(mean))
        return {"text": name, "mean": _rounded(mean), "groups": [_rounded(g) for g in groups]}


def _batch(text: Captured, group: int, asked: np.ndarray) -> Batch:
    """Some queries of a text, by their number."""
    return Batch(
        jnp.asarray(text.inputs[group]),
        jnp.asarray(text.positions[asked]),
        jnp.asarray(text.targets[group, asked]),
    )


def _rounded(quality: Quality) -> dict[str, Any]:
    """The figures as JSON has them."""
    return {
        name: np.round(np.asarray(x, np.float64), 4).tolist()
        for name, x in quality._asdict().items()
    }
