"""Sizes of GLM-5.x and DeepSeek-V3.2: multi-head latent attention, top-K indexers, MoE.

Knows what a valid model of the family is; knows nothing about arrays, files or devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dhisparse_jax.configs.formats import COMPUTED, check_history_formats
from dhisparse_jax.configs.quantised import FLOAT
from dhisparse_jax.configs.rope import Yarn
from dhisparse_jax.configs.values import check_counts, check_formats, config_of
from dhisparse_jax.errors import UserError
from dhisparse_jax.mesh import ONE_DEVICE, MeshShape

IndexerType = Literal["full", "shared"]
"""Whether a layer has an indexer, or takes the selection of the last one that has."""

RopeStyle = Literal["interleaved", "half-split"]
"""Whether neighbours, or channels of both halves, are rotated together."""


@dataclass(frozen=True, kw_only=True)
class GlmConfig:
    """Sizes and constants of one model.

    Attributes:
        vocab_size: Tokens that there are.
        context: Longest sequence the model was made for, in positions.
        num_layers: Layers.
        hidden_size: Width of the residual stream.
        num_heads: Heads of the queries.
        q_lora_rank: Width of the latent that queries are made of.
        kv_lora_rank: Width of the latent that a row holds.
        qk_nope_dim: Channels of a head that are not rotated.
        qk_rope_dim: Rotated channels of a head.
        v_dim: Width of a value head.
        num_dense_layers: Leading layers with a plain MLP instead of experts.
        dense_intermediate_size: Width inside a plain MLP.
        num_experts: Routed experts of a layer.
        experts_per_token: Of them, those that a token goes through.
        expert_intermediate_size: Width inside an expert.
        num_shared_experts: Experts that every token goes through.
        num_expert_groups: Groups of the router.
        kept_expert_groups: Router groups that may be chosen from, out of `num_expert_groups`.
        normalise_routing: Whether the weights of the chosen experts sum to one.
        routed_scale: Factor on the sum of the routed experts.
        index_heads: Heads of the indexer.
        index_dim: Width of an index key, and of a head of the indexer.
        index_top_k: Rows that a query attends to.
        indexer_types: Per layer, "full" (has an indexer) or "shared" (takes the selection of the
            nearest preceding full layer).
        index_rope_style: Which channels of an index head form a rotated pair.
        rope_theta: Base of the rotary frequencies.
        yarn: How the rotary positions of attention and indexer are stretched.
        norm_eps: Epsilon of the norms.
        latent_norm_eps: Epsilon of the two latent norms. Transformers uses 1e-6 here whatever
            `norm_eps` is; serving systems use `norm_eps`.
        index_norm_eps: Epsilon of the norm of index keys.
        bos_id: Token that a text begins with; None: there is none.
        eos_ids: Tokens that end a text.
        param_dtype: Dtype that the weights are stored in.
        expert_format: Format of routed experts that stay quantised (`configs.quantised`).
        kv_format: Format of the rows that are kept of every layer (`configs.formats`).
        index_format: Format of the index keys.
        mesh: Devices that it is made to be served on, H200s of one host or several: experts spread
            over one axis, all other weights and the history of some requests on each device. It
            does not make it another model.
        power_scales: Whether the scales of the model's fp8 activations are powers of two.

    Raises:
        UserError: A size that no model of the family can have.
    """

    vocab_size: int
    context: int
    num_layers: int
    hidden_size: int

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_dim: int
    qk_rope_dim: int
    v_dim: int

    num_dense_layers: int
    dense_intermediate_size: int
    num_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    num_shared_experts: int = 1
    num_expert_groups: int = 1
    kept_expert_groups: int = 1
    normalise_routing: bool = True
    routed_scale: float = 2.5

    index_heads: int
    index_dim: int
    index_top_k: int
    indexer_types: tuple[IndexerType, ...]
    index_rope_style: RopeStyle = "interleaved"

    rope_theta: float
    yarn: Yarn | None = None
    norm_eps: float = 1e-5
    latent_norm_eps: float = 1e-6
    index_norm_eps: float = 1e-6

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    param_dtype: str = "bfloat16"
    expert_format: str = FLOAT
    kv_format: str = COMPUTED
    index_format: str = COMPUTED
    mesh: MeshShape = field(default=ONE_DEVICE, compare=False)
    power_scales: bool = False

    def __post_init__(self) -> None:
        """Checks every size; raises UserError on the first that cannot be."""
        check_counts(self, {"num_dense_layers", "num_shared_experts", "bos_id"})
        self._check_indexer_types()
        self._check_routing()
        if self.qk_rope_dim % 2:
            raise UserError(
                f"qk_rope_dim is {self.qk_rope_dim}, but rotated channels come in pairs"
            )
        if self.index_dim < self.qk_rope_dim:
            raise UserError(
                f"index_dim {self.index_dim} is below qk_rope_dim {self.qk_rope_dim}, "
                "which are rotated in every index head"
            )
        if self.index_rope_style not in ("interleaved", "half-split"):
            raise UserError(
                f"index_rope_style is {self.index_rope_style!r}; use 'interleaved' or 'half-split'"
            )
        check_formats(self.param_dtype, self.expert_format)
        check_history_formats(self.kv_format, self.index_format, self.index_dim)

    def _check_indexer_types(self) -> None:
        """One type per layer, and something to share before it is shared."""
        if len(self.indexer_types) != self.num_layers:
            raise UserError(
                f"indexer_types has {len(self.indexer_types)} entries for {self.num_layers} layers"
            )
        unknown = sorted(set(self.indexer_types) - {"full", "shared"})
        if unknown:
            raise UserError(f"indexer_types holds {unknown[0]!r}; use 'full' or 'shared'")
        if self.indexer_types[0] != "full":
            raise UserError("indexer_types starts with 'shared', but layer 0 has nothing to share")

    def _check_routing(self) -> None:
        """The router can pick the number of experts it has to pick."""
        groups, kept = self.num_expert_groups, self.kept_expert_groups
        if self.num_dense_layers > self.num_layers:
            raise UserError(
                f"num_dense_layers {self.num_dense_layers} exceeds num_layers {self.num_layers}"
            )
        if self.num_experts % groups or kept > groups:
            raise UserError(
                f"{self.num_experts} experts do not split into {groups} groups of which {kept} "
                "are kept"
            )
        if self.experts_per_token > self.num_experts // groups * kept:
            raise UserError(
                f"experts_per_token {self.experts_per_token} exceeds the "
                f"{self.num_experts // groups * kept} experts a token may choose from"
            )

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Runs of layers that share one selection, e.g. `((0,), (1,), (2, 3, 4, 5))`."""
        starts = [i for i, kind in enumerate(self.indexer_types) if kind == "full"]
        ends = [*starts[1:], self.num_layers]
        return tuple(tuple(range(a, b)) for a, b in zip(starts, ends, strict=True))

    @property
    def row_dim(self) -> int:
        """Numbers in the stored row of one token and layer: latent, then rotated key."""
        return self.kv_lora_rank + self.qk_rope_dim

    @property
    def qk_dim(self) -> int:
        """Width of an expanded query or key head."""
        return self.qk_nope_dim + self.qk_rope_dim

    @property
    def attention_scale(self) -> float:
        """Factor on the query-key products."""
        return self.qk_dim**-0.5 * (self.yarn.logit_factor if self.yarn else 1.0)


def derive_indexer_types(
    num_layers: int, *, freq: int = 1, offset: int = 2, pattern: str | None = None
) -> tuple[IndexerType, ...]:
    """Which layers have an indexer, when a checkpoint does not list them.

    Args:
        num_layers: Layers of the model.
        freq: Every how many layers a full one comes after the first `offset`.
        offset: Leading layers that are full, counting the first of the regular ones.
        pattern: Explicit string of "F" and "S", one per layer; wins over the rule.

    Raises:
        UserError: The pattern has another length or other letters, or `freq` is not positive.
    """
    if pattern is not None:
        if len(pattern) != num_layers or set(pattern) - {"F", "S"}:
            raise UserError(
                f"index_topk_pattern {pattern!r} must be {num_layers} letters, each F or S"
            )
        return tuple("full" if letter == "F" else "shared" for letter in pattern)
    if freq < 1:
        raise UserError(f"index_topk_freq is {freq}; it must be positive")
    return tuple(
        "full" if max(layer - offset + 1, 0) % freq == 0 else "shared"
        for layer in range(num_layers)
    )


def config_from_values(values: Mapping[str, Any]) -> GlmConfig:
    """A configuration from values that come from outside; see `configs.values.config_of`."""
    return config_of(GlmConfig, values)
