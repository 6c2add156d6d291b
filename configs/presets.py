"""Presets: sizes of models that the library can serve."""

from dhisparse_jax.config import FP8
from dhisparse_jax.configs.glm import GlmConfig, derive_indexer_types

GLM_5_3 = GlmConfig(
    vocab_size=154_880,
    context=1_048_576,
    num_layers=78,
    hidden_size=6144,
    num_heads=64,
    q_lora_rank=2048,
    kv_lora_rank=512,
    qk_nope_dim=192,
    qk_rope_dim=64,
    v_dim=256,
    num_dense_layers=3,
    dense_intermediate_size=12_288,
    num_experts=256,
    experts_per_token=8,
    expert_intermediate_size=2048,
    index_heads=32,
    index_dim=128,
    index_top_k=2048,
    indexer_types=derive_indexer_types(78, freq=4, offset=3),
    rope_theta=8e6,
    bos_id=0,
    eos_ids=(154_820, 154_827, 154_829),
    kv_format=FP8,
    index_format=FP8,
)
"""GLM-5.3, 753 B parameters with its MTP layer; its history as it is served, 53,940 B per token."""

TINY = GlmConfig(
    vocab_size=256,
    context=8192,
    num_layers=8,
    hidden_size=256,
    num_heads=4,
    q_lora_rank=128,
    kv_lora_rank=64,
    qk_nope_dim=48,
    qk_rope_dim=16,
    v_dim=64,
    num_dense_layers=3,
    dense_intermediate_size=320,
    num_experts=8,
    experts_per_token=2,
    expert_intermediate_size=96,
    index_heads=4,
    index_dim=32,
    index_top_k=64,
    indexer_types=derive_indexer_types(8, freq=4, offset=3),
    rope_theta=1e4,
    bos_id=0,
)
"""Byte-level, with GLM-5.3's structure; part of the package. Byte 0 separates its documents."""

PRESETS: dict[str, GlmConfig] = {"glm-5.3": GLM_5_3, "tiny": TINY}
