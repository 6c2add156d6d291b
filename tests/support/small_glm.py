"""A GLM configuration small enough to compile in a second or two, with every kind of layer."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from dhisparse_jax.configs import GlmConfig
from dhisparse_jax.models.glm.model import GlmModel

FIXTURES = Path(__file__).parents[1] / "fixtures"
FIXTURE = FIXTURES / "glm_tiny"
PUBLISHED_MODELS = ("glm_tiny", "deepseek_v32_tiny")

SMALL = GlmConfig(
    vocab_size=256,
    context=128,
    num_layers=3,
    hidden_size=32,
    num_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_dim=8,
    qk_rope_dim=4,
    v_dim=12,
    num_dense_layers=1,
    dense_intermediate_size=32,
    num_experts=4,
    experts_per_token=2,
    expert_intermediate_size=16,
    index_heads=2,
    index_dim=8,
    index_top_k=6,
    indexer_types=("full", "full", "shared"),
    rope_theta=1e4,
    bos_id=0,
    param_dtype="float32",
)


def small_model(seed: int = 0, **changes: object) -> GlmModel:
    return GlmModel(dataclasses.replace(SMALL, **changes), rngs=nnx.Rngs(seed), dtype=jnp.float32)


def with_real_heads() -> GlmConfig:
    """Rows, attention heads and index heads as wide as those of GLM-5.x, and little else."""
    return dataclasses.replace(
        SMALL,
        context=1024,
        num_heads=16,
        kv_lora_rank=512,
        qk_rope_dim=64,
        index_heads=32,
        index_dim=128,
        index_top_k=64,
    )
