"""Settings of a fit."""

from dataclasses import dataclass

from dhisparse_jax.configs.llama import FittedConfig
from dhisparse_jax.errors import UserError


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """A fit of indexers to a frozen model.

    Attributes:
        fitted: Sizes of the indexers.
        length: Tokens of a text; the model's full context by default.
        texts: How many are captured to fit on.
        queries: Queries of each text whose attention is kept.
        steps: Updates of every indexer.
        batch: Queries of an update, all of one text.
        rate: Highest learning rate; it falls to a hundredth by a cosine.
        warmup: Part of the steps in which it rises from zero.
        save_steps: Steps between saves, and progress lines.
        counts: Selection sizes by which the fit is judged.

    Raises:
        UserError: a batch of more queries than a text has.
    """

    fitted: FittedConfig
    length: int
    seed: int = 0
    texts: int = 5
    queries: int = 256
    steps: int = 300
    batch: int = 64
    rate: float = 4e-3
    warmup: float = 0.05
    save_steps: int = 20
    counts: tuple[int, ...] = (128, 256, 512)
    adam_decays: tuple[float, float] = (0.9, 0.98)
    max_gradient_norm: float = 1.0
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        """Checks what would only fail minutes into the run."""
        if not 0 < self.batch <= self.queries <= self.length:
            raise UserError(
                f"a batch of {self.batch} of {self.queries} queries of {self.length} tokens: each "
                "must be at most the next"
            )
