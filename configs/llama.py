"""Sizes of Llama-like models, which attend to everything, and of indexers that are fitted to them.

Knows what a valid model of the family is; knows nothing about arrays, files or devices.
"""

from dataclasses import dataclass

from dhisparse_jax.configs.glm import RopeStyle
from dhisparse_jax.configs.rope import Yarn
from dhisparse_jax.configs.values import check_counts
from dhisparse_jax.errors import UserError


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and constants of one model: grouped queries, rotary positions, a gated MLP.

    Attributes:
        vocab_size: Tokens that there are.
        context: Longest sequence the model was made for, in positions.
        num_layers: Layers.
        hidden_size: Width of the residual stream.
        num_heads: Heads of the queries.
        num_kv_heads: Heads of keys and values; each is read by `num_heads / num_kv_heads` queries.
        head_dim: Width of a head.
        intermediate_size: Width inside the MLP.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Epsilon of the norms.
        tied: Whether the embedding is the output matrix, too.
        rope_style: Which channels of a head form a rotated pair, as the weights are stored.
        param_dtype: Dtype of the weights in memory.

    Raises:
        UserError: A size that no model of the family can have.
    """

    vocab_size: int
    context: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    norm_eps: float
    tied: bool
    rope_style: RopeStyle = "interleaved"
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        """Checks every size; raises UserError on the first that cannot be."""
        check_counts(self, set())
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"{self.num_heads} query heads do not divide among {self.num_kv_heads} of keys"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim is {self.head_dim}, but rotated channels come in pairs")

    @property
    def scale(self) -> float:
        """Factor on the products of queries and keys."""
        return self.head_dim**-0.5


@dataclass(frozen=True, kw_only=True)
class FittedConfig:
    """Sizes of the indexers that are fitted to a model, one for each group of its layers.

    Attributes:
        hidden_size: Width of the model's residual stream, which indexers read.
        layers_per_group: How many layers share each selection, in order; each group has an indexer.
        index_heads: Heads of its queries.
        index_dim: Width of its queries and of its keys.
        qk_rope_dim: Leading channels of them that are rotated.
        rope_theta: Base of their frequencies; the model's.
        index_norm_eps: Epsilon of the norm of index keys.
        index_rope_style: Which channels of a head form a rotated pair.
        param_dtype: Dtype that its weights are saved in.

    Raises:
        UserError: A size that no indexer can have.
    """

    hidden_size: int
    layers_per_group: tuple[int, ...]
    index_heads: int
    index_dim: int
    qk_rope_dim: int
    rope_theta: float
    index_norm_eps: float = 1e-6
    index_rope_style: RopeStyle = "half-split"
    param_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        """Checks every size; raises UserError on the first that cannot be."""
        check_counts(self, set())
        if self.qk_rope_dim % 2 or self.qk_rope_dim > self.index_dim:
            raise UserError(
                f"qk_rope_dim is {self.qk_rope_dim}; it must be even, and at most index_dim "
                f"{self.index_dim}"
            )
        if min(self.layers_per_group, default=0) < 1:
            raise UserError(f"layers_per_group is {self.layers_per_group}; groups have layers")

    @property
    def q_lora_rank(self) -> int:
        """Width of what index queries are made of: there is no latent, so the residual stream."""
        return self.hidden_size

    @property
    def yarn(self) -> Yarn | None:
        """How positions are stretched: not at all."""
        return None

    @property
    def firsts(self) -> tuple[int, ...]:
        """Numbers of the layers that select."""
        sizes = self.layers_per_group
        return tuple(sum(sizes[:group]) for group in range(len(sizes)))


def grouped(num_layers: int, size: int) -> tuple[int, ...]:
    """Layers per group, all groups but the last of one size.

    In:  grouped(8, 3)      Out: (3, 3, 2)
    """
    return tuple(min(size, num_layers - first) for first in range(0, num_layers, size))
