"""Settings of a draft's training run, and the sizes of the bundled drafts."""

from dataclasses import dataclass

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.draft.config import DraftConfig, Kind, MarkovConfig, SelectorConfig

# A byte that no UTF-8 text contains, so that its embedding row is free to stand for "unknown".
MASK_BYTE = 0xFF
VERIFY_BLOCK = 8
_WINDOW = 512
_LAYERS = 3


def bundled_draft(kind: Kind, target: GlmConfig) -> DraftConfig:
    """Sizes of a draft for the bundled model.

    All three verify the same block of 8: the anchor and 7 proposals. So a DSpark, whose anchor row
    proposes too, has 7 rows, and the others have 8.
    """
    layers = target.num_layers
    return DraftConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.hidden_size * 2,
        num_layers=_LAYERS,
        num_heads=4,
        num_kv_heads=2,
        head_dim=target.hidden_size // 4,
        target_hidden_size=target.hidden_size,
        target_layers=layers,
        taps=tuple(sorted({layers // 4, layers // 2, layers - 2})),
        mask_token_id=min(MASK_BYTE, target.vocab_size - 1),
        block_size=VERIFY_BLOCK - 1 if kind == "dspark" else VERIFY_BLOCK,
        anchor_first=kind == "dspark",
        windows=(_WINDOW,) * _LAYERS,
        causal=(False,) * _LAYERS,
        rope_theta=1e4,
        selector=SelectorConfig(rank=128) if kind == "dflash2" else None,
        markov=MarkovConfig(rank=128) if kind == "dspark" else None,
    )


@dataclass(frozen=True, kw_only=True)
class DraftTrainConfig:
    """A training run of one draft.

    Attributes:
        draft: Sizes; training keeps float32 weights.
        seconds: Wall time of the whole run, with compilation, continuations and evaluation.
        reserve_seconds: Part of it kept for the final evaluation and for saving.
        generate_seconds: Most wall time for making continuations where there are none yet.
        max_updates: Chunks of steps; None lets time decide.
        context: Positions per sequence.
        sequences: Sequences that the target reads at once; features are kept for one round.
        steps_per_round: Optimizer steps on these, each on its part of the sequences.
        rounds_per_chunk: Rounds in one dispatch.
        anchors: Blocks per sequence.
        generate_batch: Sequences that are continued at once.
        max_batches: Most batches of continuations.
        greedy_share: Part of the continuations that are greedy; the others have temperature 0.8.
        continued_share: Part of the anchors that stand in the target's own continuation.
        rate: Highest learning rate; falls to zero by a cosine.
        warmup: Part of the time in which the rate rises from zero.
        decay: Rows further from the anchor count less: `exp(-row / decay)`.
        compute_dtype: Dtype of activations.
        eval_stride: Bytes between evaluation prompts in each left-out module.
        eval_batch: Evaluation sequences at once.
        report_seconds: Time between progress lines.
        save_seconds: Time between checkpoints.
    """

    draft: DraftConfig
    seed: int = 0
    seconds: float = 360.0
    reserve_seconds: float = 15.0
    generate_seconds: float = 60.0
    max_updates: int | None = None
    context: int = 1024
    sequences: int = 64
    steps_per_round: int = 4
    rounds_per_chunk: int = 8
    anchors: int = 256
    generate_batch: int = 1024
    max_batches: int = 24
    greedy_share: float = 0.75
    continued_share: float = 0.75
    rate: float = 2e-3
    warmup: float = 0.04
    decay: float = 4.0
    weight_decay: float = 0.01
    adam_decays: tuple[float, float] = (0.9, 0.95)
    max_gradient_norm: float = 1.0
    compute_dtype: str = "bfloat16"
    eval_stride: int = 4096
    eval_batch: int = 16
    report_seconds: float = 5.0
    save_seconds: float = 30.0

    def __post_init__(self) -> None:
        """Checks what would only fail minutes into the run."""
        if self.seconds <= self.reserve_seconds:
            raise UserError(
                f"{self.seconds:g} s leave no time to train: {self.reserve_seconds:g} s are kept "
                "for the evaluation"
            )
        if self.sequences % self.steps_per_round:
            raise UserError(
                f"{self.sequences} sequences do not split into {self.steps_per_round} steps"
            )
        if self.context <= 4 * self.draft.block_size:
            raise UserError(
                f"a context of {self.context} is too short for blocks of {self.draft.block_size}"
            )


def smoke_config(draft: DraftConfig, *, seed: int, context: int = 128) -> DraftTrainConfig:
    """A few updates on short sequences: a minute on a CPU."""
    return DraftTrainConfig(
        draft=draft,
        seed=seed,
        seconds=3600.0,
        max_updates=2,
        context=context,
        sequences=4,
        steps_per_round=2,
        rounds_per_chunk=1,
        anchors=8,
        generate_batch=4,
        max_batches=1,
        compute_dtype="float32",
        eval_stride=50_000,
        eval_batch=4,
        report_seconds=0.0,
    )
