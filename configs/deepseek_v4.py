"""Sizes of DeepSeek-V4: a window in every layer, compressed entries beside it in most, MoE, mHC.

Knows what a valid model of the family is; knows nothing about arrays, files or devices.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from dhisparse_jax.configs.formats import COMPUTED, HISTORY_FORMATS, check_history_formats
from dhisparse_jax.configs.quantised import FLOAT
from dhisparse_jax.configs.rope import Yarn
from dhisparse_jax.configs.values import check_counts, check_formats
from dhisparse_jax.errors import UserError
from dhisparse_jax.mesh import ONE_DEVICE, MeshShape

LayerKind = Literal["window", "selected", "all"]
"""What a layer attends to beside its window: nothing, the best of many entries (published as CSA),
or all of few (HCA)."""

WINDOW, SELECTED, ALL = "window", "selected", "all"


@dataclass(frozen=True, kw_only=True)
class V4Sizes:
    """Sizes and constants that all models since DeepSeek-V4 have.

    Attributes:
        vocab_size: Tokens that there are.
        context: Longest sequence the model was made for, in positions.
        hidden_size: Width of the residual stream.
        num_heads: Heads of the queries.
        head_dim: Width of a head, and of the one key that is the value too.
        rope_dim: Rotated channels, the last ones of every head.
        q_lora_rank: Width of the latent that queries are made of.
        output_groups: Groups of heads that the first output matrix maps by themselves.
        output_lora_rank: Width of each of them after it.
        window: Newest positions that every query attends to, its own included.
        index_heads: Heads of the indexer.
        index_dim: Width of an index key, and of a head of the indexer.
        index_top_k: Entries that a query selects.
        num_experts: Routed experts of a layer.
        experts_per_token: Of them, those that a token goes through.
        expert_intermediate_size: Width inside an expert.
        routed_scale: Factor on the sum of the routed experts.
        swiglu_limit: Bound on what goes into an expert's activation.
        rope_theta: Base of the rotary frequencies in layers that attend to their window alone.
        compress_theta: The same in the others.
        yarn: How positions are stretched in those.
        streams: Copies of the residual stream (mHC).
        sinkhorn_steps: Alternations that make the mixing of the streams doubly stochastic.
        hc_eps: Epsilon of the mixing of the streams.
        norm_eps: Epsilon of the norms.
        bos_id: Token that a text begins with; None: there is none.
        eos_ids: Tokens that end a text.
        param_dtype: Dtype that the weights are stored in.
        expert_format: Format of routed experts that stay quantised (`configs.quantised`).
        kv_format: Format of the rows and entries that are kept of every layer (`configs.formats`).
        index_format: Format of the index keys.
        mesh: Devices that it is made to be served on, H200s of one host or several: experts spread
            over one axis, all other weights and the history of some requests on each device. It
            does not make it another model.

    Raises:
        UserError: A size that no model of the family can have.
    """

    vocab_size: int
    context: int
    hidden_size: int

    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    output_groups: int
    output_lora_rank: int

    window: int

    index_heads: int
    index_dim: int
    index_top_k: int

    num_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    routed_scale: float
    swiglu_limit: float

    rope_theta: float
    compress_theta: float
    yarn: Yarn | None = None

    streams: int = 4
    sinkhorn_steps: int = 20
    hc_eps: float = 1e-6
    norm_eps: float = 1e-6

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    param_dtype: str = "bfloat16"
    expert_format: str = FLOAT
    kv_format: str = COMPUTED
    index_format: str = COMPUTED
    mesh: MeshShape = field(default=ONE_DEVICE, compare=False)

    row_formats: ClassVar[tuple[str, ...]] = HISTORY_FORMATS[:-1]
    """What rows can be kept in."""
    rotates_keys: ClassVar[bool] = True
    """Whether small index keys are multiplied by the Hadamard matrix."""

    def check_sizes(self, may_be_zero: Collection[str]) -> None:
        """Raises UserError on the first size that cannot be; those named may switch a part off."""
        check_counts(self, {"bos_id", *may_be_zero})
        check_formats(self.param_dtype, self.expert_format)
        check_history_formats(
            self.kv_format,
            self.index_format,
            self.index_dim,
            row_formats=self.row_formats,
            key_formats=HISTORY_FORMATS,
            rotated=self.rotates_keys,
        )
        if self.rope_dim % 2 or self.rope_dim > min(self.head_dim, self.index_dim):
            raise UserError(
                f"rope_dim is {self.rope_dim}; it must be even, and at most head_dim "
                f"{self.head_dim} and index_dim {self.index_dim}"
            )
        if self.num_heads % self.output_groups:
            raise UserError(
                f"{self.num_heads} heads do not split into {self.output_groups} output_groups"
            )
        if self.experts_per_token > self.num_experts:
            raise UserError(
                f"experts_per_token {self.experts_per_token} exceeds the {self.num_experts} experts"
            )

    @property
    def attention_scale(self) -> float:
        """Factor on the query-key products."""
        return self.head_dim**-0.5


@dataclass(frozen=True, kw_only=True)
class V4Config(V4Sizes):
    """Sizes and constants of one model.

    Attributes:
        layer_kinds: What each layer attends to beside its window.
        selected_rate: Positions per entry in "selected" layers.
        all_rate: Positions per entry in "all" layers.
        num_hash_layers: Leading layers whose experts follow from the token id alone.

    Raises:
        UserError: A size that no model of the family can have.
    """

    layer_kinds: tuple[LayerKind, ...]
    selected_rate: int = 4
    all_rate: int = 128
    num_hash_layers: int

    def __post_init__(self) -> None:
        """Checks every size; raises UserError on the first that cannot be."""
        self.check_sizes({"num_hash_layers"})
        if SELECTED not in self.layer_kinds:
            raise UserError(f"layer_kinds has no {SELECTED!r} layer, so there is nothing to select")
        if self.num_hash_layers > self.num_layers:
            raise UserError(
                f"num_hash_layers {self.num_hash_layers} exceeds the {self.num_layers} layers"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layer_kinds)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Runs of layers with one "selected" layer each: it and what follows.

        Layers before the first one belong to its group: `((0, 1, 2, 3), (4, 5))` for two "window"
        layers, then "selected" and "all" in turn.
        """
        starts = [i for i, kind in enumerate(self.layer_kinds) if kind == SELECTED]
        ends = [*starts[1:], self.num_layers]
        return tuple(tuple(range(a, b)) for a, b in zip([0, *starts[1:]], ends, strict=True))

    def rate(self, layer: int) -> int | None:
        """Positions per entry of a layer; None where it has no entries."""
        return {SELECTED: self.selected_rate, ALL: self.all_rate}.get(self.layer_kinds[layer])
