"""Sizes of drafts for GLM-5.x, as far as they are public."""

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.models.draft.config import DraftConfig, MarkovConfig, SelectorConfig

KINDS = ("dflash2", "dspark")


def draft_config(kind: str, target: GlmConfig) -> DraftConfig:
    """Sizes of a draft for GLM-5.x: block 8, five layers, windows of 2,048.

    Width, taps (evenly spread), heads and rope are those published for drafts of GLM-5.2; the
    inner width is that of the target's dense layers. Of GLM-5.3-DFlash2 only the number of layers
    and the block are public. DSpark: three layers, whose anchor proposes too, and 7 proposals.
    """
    layers = 5 if kind == "dflash2" else 3
    heads = max(1, target.num_heads)
    spread = [round(1 + i * (target.num_layers - 3) / 4) for i in range(5)]
    return DraftConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.dense_intermediate_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=max(1, heads // 4),
        head_dim=64,
        target_hidden_size=target.hidden_size,
        target_layers=target.num_layers,
        taps=tuple(sorted(set(spread))),
        mask_token_id=target.vocab_size - 1,
        block_size=8 if kind == "dflash2" else 7,
        anchor_first=kind == "dspark",
        windows=(2048,) * layers,
        causal=(False,) * layers,
        rope_theta=target.rope_theta,
        selector=SelectorConfig() if kind == "dflash2" else None,
        markov=MarkovConfig() if kind == "dspark" else None,
    )
