"""Stretching of rotary positions. Knows nothing about arrays."""

from dataclasses import dataclass

from dhisparse_jax.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN (Peng et al., 2023): frequencies for contexts longer than those of the pretraining.

    Attributes:
        factor: How many times longer.
        context: Positions of the pretraining.
        beta_fast: Turns within `context` from which a channel pair keeps its frequency.
        beta_slow: Turns up to which its frequency is divided by `factor`.
        amplitude: Factor of the rotated channels.
        logit_factor: Factor of the attention logits.
    """

    factor: float
    context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    amplitude: float = 1.0
    logit_factor: float = 1.0

    def __post_init__(self) -> None:
        """Raises UserError on the first number that cannot be."""
        for name in ("factor", "context", "beta_fast", "beta_slow", "amplitude", "logit_factor"):
            if not getattr(self, name) > 0:
                raise UserError(f"yarn: {name} is {getattr(self, name)}; it must be positive")
