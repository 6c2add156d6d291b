"""The run: phases one after the other, each compiled in the background while others train."""

import logging
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Key

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.models.glm.dense import Mode
from dhisparse_jax.models.glm.model import GlmModel
from dhisparse_jax.models.params import Nested, abstract_params, cast_like, params_of
from dhisparse_jax.models.train.backend import choose_backend
from dhisparse_jax.models.train.config import Phase, TrainConfig
from dhisparse_jax.models.train.corpus import Corpus
from dhisparse_jax.models.train.evaluate import EvaluateBatch, Evaluator, xz_bits_per_byte
from dhisparse_jax.models.train.progress import Clock, PhaseProgress, report
from dhisparse_jax.models.train.record import RunRecord, save_run
from dhisparse_jax.models.train.step import (
    Metrics,
    Step,
    StepRates,
    TrainState,
    make_optimizer,
    make_step,
    rates_at,
)

log = logging.getLogger(__name__)

MODES: tuple[Mode, ...] = ("dense", "sparse", "window")

# Steps that may be queued on the device: enough to keep it busy, few enough to stop in time.
_MAX_QUEUED = 3


def initial_params(config: GlmConfig, seed: int) -> Nested:
    """Random float32 weights."""
    model = nnx.jit(lambda: GlmModel(config, rngs=nnx.Rngs(seed)))()
    return jax.tree.map(lambda x: x.astype(jnp.float32), params_of(model))


def run_key(seed: int) -> Key[Array, ""]:
    """Key of all randomness in training; of the kind that accelerators generate fastest."""
    return jax.random.key(seed, impl="rbg")


def compile_step(config: TrainConfig, phase: Phase, step: Step, stream_bytes: int) -> Any:  # noqa: ANN401
    """Compiles a phase's step from shapes alone; its state is updated in place."""
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), abstract_params(config.model)
    )
    moments = jax.eval_shape(make_optimizer(config).init, params)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    start = time.monotonic()
    compiled = (
        jax.jit(step, donate_argnums=0)
        .lower(
            TrainState(params, moments),
            jax.ShapeDtypeStruct((stream_bytes,), jnp.uint8),
            jax.eval_shape(lambda: run_key(config.seed)),
            StepRates(scalar, scalar),
        )
        .compile()
    )
    log.info("compiled %s in %.0f s", phase.name, time.monotonic() - start)
    return compiled


@dataclass
class Trainer:
    """One training run.

    Attributes:
        config: Settings.
        corpus: Training stream and evaluation files.
        out: Folder for the checkpoint and the record.
        clock: Started with the run.
    """

    config: TrainConfig
    corpus: Corpus
    out: Path
    clock: Clock
    _steps: int = 0
    _record: RunRecord = field(init=False)
    _compiled: dict[Mode, Future[EvaluateBatch]] = field(default_factory=dict)

    def run(self) -> RunRecord:
        """Trains, evaluates and saves; the checkpoint is also written after every phase."""
        config = self.config
        backend = choose_backend(config)
        log.info("dense attention: %s, compute dtype: %s", backend, config.compute_dtype)
        self._record = RunRecord.start(config, self.corpus, backend)
        params = initial_params(config.model, config.seed)
        stream = jnp.asarray(self.corpus.stream)
        evaluator = self._evaluator()
        with ThreadPoolExecutor(1) as compiler:
            futures = [
                compiler.submit(
                    compile_step, config, phase, make_step(config, phase, backend), stream.size
                )
                for phase in config.phases
            ]
            self._compiled = {mode: compiler.submit(evaluator.compile, mode) for mode in MODES}
            for index, phase in enumerate(config.phases):
                params = self._run_phase(index, phase, futures[index], params, stream)
                mode: Mode = "dense" if phase.kind == "dense" else "sparse"
                self._evaluate(evaluator, params, mode, phase.name)
                save_run(self.out, config.model, params, self._record)
            self._finish(evaluator, params)
        return self._record

    def _run_phase(
        self, index: int, phase: Phase, future: Future[Any], params: Nested, stream: jax.Array
    ) -> Nested:
        """Trains until the phase's time or steps are over."""
        compiled = future.result()
        state = TrainState(params, make_optimizer(self.config).init(params))
        progress = PhaseProgress(
            phase,
            self.clock.seconds_for(index, self.config),
            self.config.max_steps,
            self.config.report_seconds,
        )
        key = run_key(self.config.seed)
        queued: deque[Metrics] = deque()
        while (fraction := progress.fraction) < 1:
            step_key = jax.random.fold_in(key, self._steps)
            state, metrics = compiled(state, stream, step_key, rates_at(phase, fraction))
            progress.steps += 1
            self._steps += 1
            queued.append(metrics)
            if len(queued) >= _MAX_QUEUED:
                self._observe(progress, queued.popleft())
        for metrics in queued:
            self._observe(progress, metrics)
        jax.block_until_ready(state)
        self._record.end_phase(progress, self.clock)
        return state.params

    def _observe(self, progress: PhaseProgress, metrics: Metrics) -> None:
        """Waits for a step, and reports now and then."""
        jax.block_until_ready(metrics)
        if (point := progress.observe(metrics)) is not None:
            report(progress, point, self.config.budget_seconds - self.clock.elapsed)
            self._record.add_point(progress, point, self.clock)

    def _evaluator(self) -> Evaluator:
        config = self.config
        return Evaluator(
            config.model,
            self.corpus.evaluation,
            context=config.eval_context,
            batch=config.eval_batch,
            dtype=jnp.dtype(config.compute_dtype),
            limit=config.eval_bytes,
        )

    def _rounded(self, params: Nested) -> Nested:
        """The weights as they are saved."""
        return cast_like(params, abstract_params(self.config.model))

    def _evaluate(
        self, evaluator: Evaluator, params: Nested, mode: Mode, phase: str
    ) -> dict[str, float]:
        """Measures and records one mode."""
        compiled = self._compiled[mode].result()
        figures = evaluator.bits_per_byte(self._rounded(params), compiled)
        log.info("after %s: %.4f bits/byte on left-out modules, %s", phase, figures["all"], mode)
        self._record.add_evaluation(phase, mode, figures, self.clock)
        return figures

    def _finish(self, evaluator: Evaluator, params: Nested) -> None:
        """Final figures, beside what xz needs for the same files."""
        last = self.config.phases[-1].name
        self._record.final = {mode: self._evaluate(evaluator, params, mode, last) for mode in MODES}
        limit = self.config.eval_bytes
        files = {name: text[:limit] for name, text in self.corpus.evaluation.items()}
        self._record.final["xz"] = xz_bits_per_byte(files)
        log.info("xz -9: %s", self._record.final["xz"])
        self._record.seconds = self.clock.elapsed
        save_run(self.out, self.config.model, params, self._record)
