"""Sizes of the drafter that a checkpoint of DeepSeek-V4 or V4.1 has attached: a DSpark.

What it has in common with its target is the target's: width, heads, window, streams, and the width
of experts.
"""

import dataclasses
from dataclasses import dataclass

from dhisparse_jax.configs.deepseek_v41 import SinceV4
from dhisparse_jax.configs.quantised import FLOAT
from dhisparse_jax.configs.values import check_counts, check_formats
from dhisparse_jax.errors import UserError


@dataclass(frozen=True, kw_only=True)
class AttachedConfig:
    """Sizes and constants of one drafter.

    Attributes:
        stages: Its layers.
        block_size: Rows of a block: the last token, then noise; each proposes a token.
        noise_token_id: Embedding row of the target that stands for an unknown token.
        taps: Layers of the target that it reads (`model.Taps`).
        markov_rank: Width of the predecessor's embedding.
        num_experts: Of each stage.
        experts_per_token: Of each stage.
        expert_format: Format of its routed experts that stay quantised (`configs.quantised`).

    Raises:
        UserError: A size that no drafter can have.
    """

    stages: int
    block_size: int
    noise_token_id: int
    taps: tuple[int, ...]
    markov_rank: int
    num_experts: int
    experts_per_token: int
    expert_format: str = FLOAT

    def __post_init__(self) -> None:
        """Checks every size; raises UserError on the first that cannot be."""
        check_counts(self, {"noise_token_id"})
        check_formats("float32", self.expert_format)
        if not self.taps or len(set(self.taps)) < len(self.taps):
            raise UserError(f"the draft reads layers {list(self.taps)}; name each once, at least 1")
        if self.experts_per_token > self.num_experts:
            raise UserError(
                f"experts_per_token {self.experts_per_token} of the draft exceeds its "
                f"{self.num_experts} experts"
            )

    def check_target(self, target: SinceV4) -> None:
        """Whether the drafter fits a target.

        Raises:
            UserError: It reads layers, or a token, that the target does not have.
        """
        beyond = [layer for layer in self.taps if not 0 <= layer < target.num_layers]
        if beyond:
            raise UserError(
                f"the draft reads layer {beyond[0]} of the target, but the target has "
                f"{target.num_layers} layers (0 to {target.num_layers - 1})"
            )
        if self.noise_token_id >= target.vocab_size:
            raise UserError(
                f"the draft's noise token is {self.noise_token_id}, but the vocabulary has "
                f"{target.vocab_size}"
            )


def stage_sizes(config: AttachedConfig, target: SinceV4) -> SinceV4:
    """Sizes of a stage: those of a layer of the target, with experts of its own."""
    return dataclasses.replace(
        target,
        num_experts=config.num_experts,
        experts_per_token=config.experts_per_token,
        expert_format=config.expert_format,
    )
