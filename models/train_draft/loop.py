"""The run: continuations, then chunks of training, with checkpoints and evaluations in between."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dhisparse_jax.errors import UserError
from dhisparse_jax.models.draft.checkpoint import abstract_draft, load_own_draft, make_draft
from dhisparse_jax.models.glm.decode import serve
from dhisparse_jax.models.glm.model import GlmModel
from dhisparse_jax.models.params import (
    Nested,
    build_model,
    cast_like,
    flatten,
    params_of,
    unflatten,
)
from dhisparse_jax.models.train.corpus import Corpus
from dhisparse_jax.models.train.loop import run_key
from dhisparse_jax.models.train_draft.config import DraftTrainConfig
from dhisparse_jax.models.train_draft.continuations import Prompts, continue_text
from dhisparse_jax.models.train_draft.evaluate import (
    Accepted,
    accepted_counts,
    evaluation_texts,
    walk,
)
from dhisparse_jax.models.train_draft.record import DraftRecord, resume_run, save_run
from dhisparse_jax.models.train_draft.step import (
    DraftState,
    Losses,
    Texts,
    draft_optimizer,
    make_chunk,
    rate_at,
)

log = logging.getLogger(__name__)

# An evaluation during the run shows early when something is wrong.
_EVALUATIONS = 4
_SAMPLED_TEMPERATURE = 0.8


def make_prompts(config: DraftTrainConfig, stream: np.ndarray, seed: int) -> Prompts:
    """Random pieces of the training text with random prefixes, greedy or sampled."""
    rng = np.random.default_rng(seed)
    count, length = config.generate_batch, config.context
    starts = rng.integers(0, len(stream) - length, count)
    greedy = rng.random(count) < config.greedy_share
    return Prompts(
        jnp.asarray(np.stack([stream[start : start + length] for start in starts])),
        jnp.asarray(rng.integers(length // 16, length * 15 // 16, count), jnp.int32),
        jnp.asarray(np.where(greedy, 0.0, _SAMPLED_TEMPERATURE), jnp.float32),
    )


def warm_start(params: Nested, other: Nested) -> Nested:
    """Weights of `other` where it has ones of the same name and shape.

    Raises:
        UserError: it has none.
    """
    flat, given = flatten(params), flatten(other)
    taken = {
        name: jnp.asarray(given[name])
        for name, leaf in flat.items()
        if name in given and given[name].shape == leaf.shape
    }
    if not taken:
        raise UserError("the draft to begin with has no weights of the same names and sizes")
    log.info("begins with %d of %d arrays of another draft", len(taken), len(flat))
    return unflatten(flat | taken, params)


@dataclass
class DraftTrainer:
    """One training run of one draft.

    Attributes:
        config: Settings.
        target: The model that the draft serves.
        corpus: The target's training text and evaluation files.
        out: Folder for the checkpoint and the record; a run that is there is gone on with.
        data: File that continuations are read from, or written to where it is missing.
        warm: Checkpoint of another draft, whose weights a new run begins with where it has them:
            a fresh DFlash2 with the weights of a DFlash computes what that DFlash does.
    """

    config: DraftTrainConfig
    target: GlmModel
    corpus: Corpus
    out: Path
    data: Path
    warm: Path | None = None
    _started: float = field(default_factory=time.monotonic)
    _record: DraftRecord = field(init=False)
    _weights: Nested = field(init=False)
    _generate: Any = field(init=False)
    _count: Any = field(init=False)

    def run(self) -> DraftRecord:
        """Trains until the time is over, then evaluates and saves."""
        config = self.config
        self._weights = params_of(self.target)
        self._record = DraftRecord.start(config, self.corpus)
        state, self._record = resume_run(self.out, self._record, self._fresh())
        self._record.parameters = sum(int(x.size) for x in jax.tree.leaves(state.params))
        log.info("%s with %d weights", config.draft.kind, self._record.parameters)
        dtype = jnp.dtype(config.compute_dtype)
        served, params = serve(
            build_model(self.target.config, self._weights, dtype), config.compute_dtype
        )
        generate = jax.jit(partial(continue_text, served))
        self._generate = lambda prompts, key: generate(params, prompts, key)
        texts = self._texts()
        left_out = self._left_out()
        chunk = self._compile(state, texts, left_out)
        state = self._train(chunk, state, texts, left_out)
        self._evaluate(state, left_out)
        save_run(self.out, config, state, self._record)
        return self._record

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _fresh(self) -> DraftState:
        """Random float32 weights, or those of another draft."""
        draft, seed = self.config.draft, self.config.seed
        made = jax.jit(lambda: params_of(make_draft(draft, jnp.float32, seed)))()
        if self.warm is not None:
            made = warm_start(made, load_own_draft(self.warm)[1])
        params = jax.tree.map(lambda x: x.astype(jnp.float32), made)
        return DraftState(params, draft_optimizer(self.config).init(params))

    def _texts(self) -> Texts:
        """Continuations of the training text: those in the file, or new ones."""
        if not self.data.is_file():
            self._write_continuations()
        with np.load(self.data) as found:
            tokens, prefix = jnp.asarray(found["tokens"]), jnp.asarray(found["prefix"])
        log.info("%d sequences of %d from %s", *tokens.shape, self.data)
        self._record.continued = len(tokens)
        return Texts(tokens, prefix)

    def _write_continuations(self) -> None:
        """As many batches as the time for them allows."""
        started = time.monotonic()
        tokens: list[np.ndarray] = []
        prefix: list[np.ndarray] = []
        for batch in range(self.config.max_batches):
            prompts = make_prompts(self.config, self.corpus.stream, self.config.seed + batch)
            key = jax.random.fold_in(run_key(self.config.seed + 1), batch)
            tokens.append(np.asarray(self._generate(prompts, key)))
            prefix.append(np.asarray(prompts.prefix))
            seconds = time.monotonic() - started
            log.info("continued batch %d after %.1f s", batch + 1, seconds)
            if seconds > self.config.generate_seconds:
                break
        self.data.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(self.data, tokens=np.concatenate(tokens), prefix=np.concatenate(prefix))

    def _left_out(self) -> jax.Array:
        """Left-out modules, with the target's greedy continuation in the second half."""
        config = self.config
        texts = evaluation_texts(
            self.corpus.evaluation,
            context=config.context,
            stride=config.eval_stride,
            batch=config.eval_batch,
        )
        count = len(texts)
        half = jnp.full(count, config.context // 2, jnp.int32)
        prompts = Prompts(jnp.asarray(texts), half, jnp.zeros(count, jnp.float32))
        return self._generate(prompts, run_key(0))

    def _compile(self, state: DraftState, texts: Texts, left_out: jax.Array) -> Any:  # noqa: ANN401
        """Compiles training and evaluation side by side, before the learning rate's time begins."""
        config, target, started = self.config, self.target.config, time.monotonic()
        inputs = (state, self._weights, texts, run_key(config.seed), np.float32(0))
        train = jax.jit(make_chunk(config, target), donate_argnums=0).lower(*inputs)
        rounded = abstract_draft(config.draft)
        count = jax.jit(partial(accepted_counts, config, target))
        with ThreadPoolExecutor(2) as compiler:
            chunk = compiler.submit(train.compile)
            lowered = count.lower(self._weights, rounded, left_out)
            self._count = compiler.submit(lowered.compile).result()
        log.info("compiled in %.0f s", time.monotonic() - started)
        return chunk.result()

    def _train(
        self,
        chunk: Any,  # noqa: ANN401
        state: DraftState,
        texts: Texts,
        left_out: jax.Array,
    ) -> DraftState:
        """Chunk after chunk, until the time or the updates are over."""
        config, record = self.config, self._record
        begin, before = self._elapsed(), record.seconds
        available = config.seconds - config.reserve_seconds - begin - before
        done, saved, reported, evaluated = 0, begin, begin, 0
        while (fraction := self._fraction(done, begin, before, available)) < 1:
            key = jax.random.fold_in(run_key(config.seed), record.steps)
            state, losses = chunk(state, self._weights, texts, key, rate_at(config, fraction))
            losses = jax.device_get(losses)
            done += 1
            record.steps += config.rounds_per_chunk * config.steps_per_round
            record.blocks += config.rounds_per_chunk * config.sequences * config.anchors
            now = self._elapsed()
            record.seconds = round(before + now, 2)
            if now - reported >= config.report_seconds:
                self._report(losses, fraction)
                reported = now
            if fraction * _EVALUATIONS > evaluated + 1:
                self._evaluate(state, left_out)
                evaluated += 1
            if now - saved >= config.save_seconds:
                save_run(self.out, config, state, record)
                saved = now
        return state

    def _fraction(self, done: int, begin: float, before: float, available: float) -> float:
        """Part of the training that is done, with earlier runs; at least 1 when it is over."""
        if self.config.max_updates is not None:
            return done / self.config.max_updates
        trained = self._elapsed() - begin + before
        total = available + before
        return trained / total if available > 0 else 1.0

    def _report(self, losses: Losses, fraction: float) -> None:
        """One line, and a point of the curve."""
        record = self._record
        log.info(
            "%3.0f %%  step %6d  loss %.4f  cross-entropy %.4f  head %.4f  first %.3f  "
            "chain %.3f  %.0f s",
            100 * fraction,
            record.steps,
            losses.total,
            losses.cross_entropy,
            losses.head,
            losses.first,
            losses.chain,
            record.seconds,
        )
        point = {name: round(float(value), 5) for name, value in losses._asdict().items()}
        record.curve.append({"step": record.steps, "seconds": record.seconds} | point)

    def _evaluate(self, state: DraftState, left_out: jax.Array) -> Accepted:
        """Accept lengths of the weights as they are saved."""
        draft = self.config.draft
        rounded = cast_like(state.params, abstract_draft(draft))
        counts = self._count(self._weights, rounded, left_out)
        accepted = walk(np.asarray(counts), draft.length)
        self._record.add_evaluation(accepted, self._record.seconds)
        log.info(
            "accept length %.3f on left-out modules, by position %s",
            accepted.length,
            " ".join(f"{part:.3f}" for part in accepted.by_position),
        )
        return accepted
