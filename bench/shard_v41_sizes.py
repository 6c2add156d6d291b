"""Sizes of DeepSeek-V4.1 for the decode benchmark: published, small, and parts."""

import dataclasses
from typing import NamedTuple

from dhisparse_jax.configs.attached import AttachedConfig
from dhisparse_jax.configs.deepseek_v41 import V41Config, table_primes
from dhisparse_jax.configs.presets import DEEPSEEK_V4_1_FLASH, DEEPSEEK_V4_1_FLASH_DSPARK
from dhisparse_jax.geometry import FP8


class Sizes(NamedTuple):
    """A model and the drafter that it has attached."""

    model: V41Config
    drafter: AttachedConfig


TINY_V41 = V41Config(
    vocab_size=256,
    context=8192,
    hidden_size=64,
    num_heads=4,
    head_dim=32,
    rope_dim=8,
    q_lora_rank=32,
    output_groups=2,
    output_lora_rank=16,
    rates=(0, 2, 2, 1, 1, 1),
    entry_sources=(1, 3),
    index_sources=(1, 3, 5),
    candidate_source=3,
    candidate_blocks=4,
    candidate_block=4,
    window=8,
    index_heads=4,
    index_dim=16,
    index_top_k=8,
    num_experts=16,
    experts_per_token=2,
    expert_intermediate_size=32,
    routed_scale=1.5,
    swiglu_limit=10.0,
    engram_layers=(0,),
    engram_order=3,
    engram_heads=2,
    engram_dim=32,
    engram_buckets=32,
    engram_rows=(37 + 41 + 43 + 47,),
    engram_vocab=256,
    rope_theta=1e4,
    compress_theta=1.6e5,
    bos_id=0,
)
"""With every part of the published model."""

TINY_DSPARK = AttachedConfig(
    stages=2,
    block_size=3,
    noise_token_id=255,
    taps=(4, 5),
    markov_rank=8,
    num_experts=8,
    experts_per_token=2,
)

V41_SIZES = {
    "deepseek-v4.1-flash": Sizes(
        dataclasses.replace(DEEPSEEK_V4_1_FLASH, kv_format=FP8, index_format=FP8),
        DEEPSEEK_V4_1_FLASH_DSPARK,
    ),
    "tiny-v4.1": Sizes(TINY_V41, TINY_DSPARK),
}
"""By name. No kernel takes 4-bit rows and keys, so those of the published model have 8 bits."""


def cut_model(config: V41Config, layers: int | None, gpus: int) -> V41Config:
    """The first layers of a model, and the part of its tables of n-grams that one GPU has."""
    count = layers or config.num_layers
    within = lambda numbers: tuple(number for number in numbers if number < count)
    known = within(config.engram_layers)
    source = config.candidate_source
    buckets = max(2, config.engram_buckets // gpus)
    primes = table_primes(buckets, config.engram_columns, len(known))
    return dataclasses.replace(
        config,
        rates=config.rates[:count],
        entry_sources=within(config.entry_sources),
        index_sources=within(config.index_sources),
        candidate_source=source if source is not None and source < count else None,
        engram_layers=known,
        engram_buckets=buckets,
        engram_rows=tuple(map(sum, primes)),
        table_format="fp8-rows",
        expert_format="fp4",
    )


def cut_drafter(drafter: AttachedConfig, target: V41Config) -> AttachedConfig:
    """The drafter of a model that may have fewer layers: it reads the last ones."""
    count = len(drafter.taps)
    taps = tuple(range(target.num_layers - count, target.num_layers))
    return dataclasses.replace(drafter, taps=taps, expert_format="fp4")
