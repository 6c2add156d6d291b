"""Settings of a training run: phases, optimizer, and how the time is shared."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.errors import UserError

Kind = Literal["dense", "index", "sparse"]
Attention = Literal["auto", "cudnn", "xla"]


@dataclass(frozen=True)
class Rates:
    """Learning rate of one kind of weights over a phase: `start` falls to `end` by a cosine."""

    start: float
    end: float


FROZEN = Rates(0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One stretch of training with fixed shapes.

    Attributes:
        name: Shown while it runs.
        kind: "dense" trains the model with causal attention. "index" trains only the indexers, to
            reproduce the dense attention. "sparse" trains both, with exact top-K attention.
        context: Positions per sequence.
        batch: Sequences per step.
        share: Part of the training time.
        model_rates: Learning rate of everything but the indexers.
        index_rates: Learning rate of the indexers.
        warmup: Part of the phase in which the rates rise from zero.
        chunk: Queries per attention step; bounds memory.
    """

    name: str
    kind: Kind
    context: int
    batch: int
    share: float
    model_rates: Rates = FROZEN
    index_rates: Rates = FROZEN
    warmup: float = 0.02
    chunk: int = 1024


# Short sequences first: attention over 8,192 bytes costs more than the rest of the model, and most
# of what there is to learn is local. The rates continue from one phase to the next.
PHASES = (
    Phase(
        name="dense",
        kind="dense",
        context=2048,
        batch=32,
        share=0.40,
        model_rates=Rates(3e-3, 1e-3),
    ),
    Phase(
        name="dense-long",
        kind="dense",
        context=8192,
        batch=8,
        share=0.18,
        model_rates=Rates(1e-3, 5e-4),
    ),
    Phase(
        name="index",
        kind="index",
        context=8192,
        batch=4,
        share=0.08,
        index_rates=Rates(3e-3, 5e-4),
    ),
    Phase(
        name="sparse",
        kind="sparse",
        context=8192,
        batch=4,
        share=0.34,
        model_rates=Rates(7e-4, 0.0),
        index_rates=Rates(1e-3, 0.0),
    ),
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    Attributes:
        model: Sizes; `param_dtype` is the dtype of the saved weights, training keeps float32.
        phases: In order.
        budget_seconds: Wall time of the whole run, compilation and evaluation included.
        reserve_seconds: Part of it kept for the final evaluation and for saving.
        max_steps: Steps per phase; None lets time decide.
        compute_dtype: Dtype of activations.
        attention: Kernel of dense attention over whole sequences.
        weight_decay: Decoupled decay of matrices.
        dropout: Part of each residual update that is dropped.
        z_loss: Weight of the squared log-partition of the output distribution.
        balance_rate: Step of the router biases towards equal expert load.
        eval_context: Positions per evaluation window.
        eval_batch: Windows per evaluation step.
        eval_bytes: Bytes taken from each evaluation file; None takes all.
        report_seconds: Time between progress lines.

    Raises:
        UserError: Shares that do not sum to one, or a context the model is not made for.
    """

    model: GlmConfig
    phases: tuple[Phase, ...] = PHASES
    seed: int = 0
    budget_seconds: float = 500.0
    reserve_seconds: float = 30.0
    max_steps: int | None = None
    compute_dtype: str = "bfloat16"
    attention: Attention = "auto"
    weight_decay: float = 0.1
    adam_decays: tuple[float, float] = (0.9, 0.95)
    max_gradient_norm: float = 1.0
    dropout: float = 0.1
    z_loss: float = 1e-4
    balance_rate: float = 1e-3
    eval_context: int = 8192
    eval_batch: int = 8
    eval_bytes: int | None = None
    report_seconds: float = 5.0

    def __post_init__(self) -> None:
        """Checks what would only fail minutes into the run."""
        if self.budget_seconds <= self.reserve_seconds:
            raise UserError(
                f"budget of {self.budget_seconds:g} s leaves no time to train: "
                f"{self.reserve_seconds:g} s are kept for the evaluation"
            )
        total = sum(phase.share for phase in self.phases)
        if abs(total - 1) > 1e-6:
            raise UserError(f"the phases' shares of the time sum to {total:g}, not 1")
        longest = max(self.eval_context, *(phase.context for phase in self.phases))
        if longest > self.model.context:
            raise UserError(f"context {longest} exceeds the model's {self.model.context}")


def smoke_config(model: GlmConfig, *, seed: int, context: int = 256, steps: int = 3) -> TrainConfig:
    """Every phase for a few steps on short sequences: seconds to minutes on a CPU."""
    phases = tuple(
        dataclasses.replace(
            phase,
            context=context // 2 if phase.name == "dense" else context,
            batch=2,
            chunk=context // 2,
        )
        for phase in PHASES
    )
    return TrainConfig(
        model=model,
        phases=phases,
        seed=seed,
        max_steps=steps,
        compute_dtype="float32",
        attention="xla",
        eval_context=context,
        eval_batch=4,
        eval_bytes=context,
        report_seconds=0.0,
    )
