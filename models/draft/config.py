"""What a draft model is: its sizes, what it reads of the target, and which heads it has.

Knows nothing about arrays, files, or the names that published configurations use.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.errors import UserError

MarkovKind = Literal["vanilla", "gated", "rnn"]
Kind = Literal["dflash", "dflash2", "dspark"]

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class SelectorConfig:
    """The two modules that make a DFlash2 of a DFlash.

    Attributes:
        rank: Width of the pair scores between neighbouring candidates.
        top_k: Candidates per position.
        conv_taps: Rows that a convolution reads: its own and those before it in the block.
        conv_group: Channels that share one dynamic kernel.
    """

    rank: int = 256
    top_k: int = 16
    conv_taps: int = 2
    conv_group: int = 16


@dataclass(frozen=True, kw_only=True)
class MarkovConfig:
    """The heads of a DSpark.

    Attributes:
        rank: Width of the predecessor's embedding.
        kind: How the predecessor's embedding becomes a bias on the logits.
        confidence: Whether there is a head that estimates acceptance.
        confidence_with_markov: Whether that head reads the predecessor's embedding too.
    """

    rank: int = 256
    kind: MarkovKind = "vanilla"
    confidence: bool = True
    confidence_with_markov: bool = True


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Sizes and constants of one draft model.

    Attributes:
        vocab_size: Token ids, those of the target.
        target_hidden_size: Width of the target's residual stream.
        target_layers: Layers of the target.
        taps: Target layers (from 0) after which the residual stream is read.
        mask_token_id: Embedding row of the target that stands for an unknown token.
        block_size: Rows of a block: the anchor, then masks.
        anchor_first: True when a row predicts the token after its own position, so that the
            anchor's row proposes too; False when it predicts the token at its own position.
        windows: Per layer, positions that a row sees, its own included; None sees all.
        causal: Per layer, whether a row sees only earlier rows of its block.
        input_scale: Factor on the embeddings.
        output_multiplier: Factor on the logits.
        logit_softcap: Bound of the logits, `cap * tanh(logits / cap)`; None: no bound.
        selector: DFlash2's modules, or None.
        markov: DSpark's heads, or None.
        param_dtype: Dtype that the weights are stored in.

    Raises:
        UserError: A size that no draft can have.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    target_hidden_size: int
    target_layers: int
    taps: tuple[int, ...]
    mask_token_id: int
    block_size: int
    anchor_first: bool
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    rope_theta: float
    norm_eps: float = 1e-6
    input_scale: float = 1.0
    output_multiplier: float = 1.0
    logit_softcap: float | None = None
    selector: SelectorConfig | None = None
    markov: MarkovConfig | None = None
    param_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        """Checks every size; raises UserError on the first that cannot be."""
        self._check_counts()
        if len(self.windows) != self.num_layers or len(self.causal) != self.num_layers:
            raise UserError(
                f"the draft has {self.num_layers} layers, but {len(self.windows)} windows and "
                f"{len(self.causal)} block masks"
            )
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise UserError(
                f"{self.num_heads} draft heads of {self.head_dim} do not fit "
                f"{self.num_kv_heads} key heads of an even width"
            )
        if not self.taps or not set(self.taps) <= set(range(self.target_layers)):
            raise UserError(
                f"the draft taps the target's layers {list(self.taps)}; a target of "
                f"{self.target_layers} layers has 0 to {self.target_layers - 1}"
            )
        if len(set(self.taps)) < len(self.taps):
            raise UserError(f"the draft taps the target's layers {list(self.taps)}, some twice")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise UserError(
                f"mask_token_id is {self.mask_token_id}, but the vocabulary has {self.vocab_size}"
            )
        if self.selector is not None and self.markov is not None:
            raise UserError("a draft has either DFlash2's selector or DSpark's heads, not both")
        if self.param_dtype not in _DTYPES:
            raise UserError(f"the draft's dtype is {self.param_dtype}; use {', '.join(_DTYPES)}")
        self._check_selector()

    def _check_counts(self) -> None:
        """Sizes are positive."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "mask_token_id" or isinstance(value, bool):
                continue
            if isinstance(value, int | float) and value <= 0:
                raise UserError(f"the draft's {field.name} is {value}; it must be positive")
        if any(window is not None and window < 1 for window in self.windows):
            raise UserError(f"the draft's windows are {list(self.windows)}; they must be positive")
        if self.length < 1:
            raise UserError(f"a block of {self.block_size} rows proposes nothing; use 2 or more")

    def _check_selector(self) -> None:
        """The selector has enough tokens to choose from, and its groups fill the width."""
        selector = self.selector
        if selector is None:
            return
        if not 0 < selector.top_k <= self.vocab_size:
            raise UserError(
                f"selector_top_k is {selector.top_k}, but the vocabulary has {self.vocab_size}"
            )
        if self.hidden_size % selector.conv_group:
            raise UserError(
                f"hidden_size {self.hidden_size} is not a multiple of conv_group_size "
                f"{selector.conv_group}"
            )

    @property
    def kind(self) -> Kind:
        """Which of the three it is, by its heads."""
        if self.selector is not None:
            return "dflash2"
        return "dflash" if self.markov is None else "dspark"

    @property
    def length(self) -> int:
        """Tokens that a block proposes."""
        return self.block_size if self.anchor_first else self.block_size - 1

    @property
    def window(self) -> int | None:
        """Newest committed positions that any layer reads; None: all."""
        widest = [window for window in self.windows if window is not None]
        return max(widest) if len(widest) == len(self.windows) else None


def check_target(config: DraftConfig, target: GlmConfig, width: int) -> None:
    """Whether a draft was made for a target of these sizes.

    Args:
        config: the draft.
        target: the target.
        width: of the embedding that the draft uses, the target's or its own.

    Raises:
        UserError: It was not; the message says what differs.
    """
    pairs = (
        ("a vocabulary of", config.vocab_size, target.vocab_size),
        ("hidden states of width", config.target_hidden_size, target.hidden_size),
        ("a number of layers of", config.target_layers, target.num_layers),
        ("embeddings of width", config.hidden_size, width),
    )
    for what, draft, given in pairs:
        if draft != given:
            raise UserError(
                f"the draft was made for {what} {draft}, but the target has {given}; "
                "use a draft that was trained for this target"
            )
