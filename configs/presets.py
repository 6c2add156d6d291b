"""Presets: sizes of models that the library can serve."""

import math

from dhisparse_jax.configs.attached import AttachedConfig
from dhisparse_jax.configs.deepseek_v4 import ALL, SELECTED, WINDOW, V4Config
from dhisparse_jax.configs.deepseek_v41 import V41Config
from dhisparse_jax.configs.glm import GlmConfig, derive_indexer_types
from dhisparse_jax.configs.rope import Yarn
from dhisparse_jax.geometry import FP4, FP8
from dhisparse_jax.mesh import MeshShape

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
    mesh=MeshShape(expert=8),
)
"""GLM-5.3, 753 B parameters with its MTP layer; its history as it is served, 53,940 B per token."""

DEEPSEEK_V3_2 = GlmConfig(
    vocab_size=129_280,
    context=163_840,
    num_layers=61,
    hidden_size=7168,
    num_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_dim=128,
    qk_rope_dim=64,
    v_dim=128,
    num_dense_layers=3,
    dense_intermediate_size=18_432,
    num_experts=256,
    experts_per_token=8,
    expert_intermediate_size=2048,
    num_expert_groups=8,
    kept_expert_groups=4,
    index_heads=64,
    index_dim=128,
    index_top_k=2048,
    indexer_types=derive_indexer_types(61),
    index_rope_style="half-split",
    rope_theta=1e4,
    yarn=Yarn(factor=40.0, context=4096, logit_factor=(0.1 * math.log(40.0) + 1.0) ** 2),
    norm_eps=1e-6,
    bos_id=0,
    eos_ids=(1,),
    kv_format=FP8,
    index_format=FP8,
    mesh=MeshShape(expert=8),
    power_scales=True,
)
"""DeepSeek-V3.2, 672 B parameters without its MTP layer; its history as it is served, 48,068 B per
token."""

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

_V4_YARN = Yarn(factor=16.0, context=65_536)

DEEPSEEK_V4_FLASH = V4Config(
    vocab_size=129_280,
    context=1_048_576,
    hidden_size=4096,
    num_heads=64,
    head_dim=512,
    rope_dim=64,
    q_lora_rank=1024,
    output_groups=8,
    output_lora_rank=1024,
    layer_kinds=(WINDOW, WINDOW, *(SELECTED, ALL) * 20, SELECTED),
    window=128,
    index_heads=64,
    index_dim=128,
    index_top_k=512,
    num_hash_layers=3,
    num_experts=256,
    experts_per_token=6,
    expert_intermediate_size=2048,
    routed_scale=1.5,
    swiglu_limit=10.0,
    rope_theta=1e4,
    compress_theta=1.6e5,
    yarn=_V4_YARN,
    bos_id=0,
    eos_ids=(1,),
    kv_format=FP8,
    index_format=FP8,
    mesh=MeshShape(data=4, expert=2),
)
"""DeepSeek-V4-Flash, 284.3 B parameters without its MTP layer; its history as it is served."""

DEEPSEEK_V4_PRO = V4Config(
    vocab_size=129_280,
    context=1_048_576,
    hidden_size=7168,
    num_heads=128,
    head_dim=512,
    rope_dim=64,
    q_lora_rank=1536,
    output_groups=16,
    output_lora_rank=1024,
    layer_kinds=(ALL, ALL, *(SELECTED, ALL) * 29, SELECTED),
    window=128,
    index_heads=64,
    index_dim=128,
    index_top_k=1024,
    num_hash_layers=3,
    num_experts=384,
    experts_per_token=6,
    expert_intermediate_size=3072,
    routed_scale=2.5,
    swiglu_limit=10.0,
    rope_theta=1e4,
    compress_theta=1.6e5,
    yarn=_V4_YARN,
    bos_id=0,
    eos_ids=(1,),
    kv_format=FP8,
    index_format=FP8,
    mesh=MeshShape(expert=16),
)
"""DeepSeek-V4-Pro, 1.57 T parameters without its MTP layer; its history as it is served."""

DEEPSEEK_V4_1_FLASH = V41Config(
    vocab_size=129_280,
    context=1_048_576,
    hidden_size=5120,
    num_heads=64,
    head_dim=512,
    rope_dim=64,
    q_lora_rank=1280,
    output_groups=8,
    output_lora_rank=1024,
    rates=(0, 0, *(2,) * 18, *(1,) * 20),
    entry_sources=(2, 8, 14, 20),
    index_sources=(2, 8, 14, 20, 24, 28, 32, 36),
    candidate_source=20,
    window=128,
    index_heads=32,
    index_dim=128,
    index_top_k=512,
    num_experts=384,
    experts_per_token=6,
    expert_intermediate_size=2304,
    routed_scale=1.5,
    swiglu_limit=10.0,
    engram_layers=(1, 14),
    engram_rows=(384_006_168, 384_016_682),
    rope_theta=1e4,
    compress_theta=1.6e5,
    yarn=_V4_YARN,
    norm_eps=1e-20,
    bos_id=0,
    eos_ids=(1,),
    kv_format=FP4,
    index_format=FP4,
    mesh=MeshShape(data=2, expert=4),
)
"""DeepSeek-V4.1-Flash, text alone: 552 B parameters without its drafter and its Engram tables; its
history as it is served, 890 B per token."""

DEEPSEEK_V4_1_FLASH_DSPARK = AttachedConfig(
    stages=3,
    block_size=5,
    noise_token_id=128_799,
    taps=(37, 38, 39),
    markov_rank=256,
    num_experts=128,
    experts_per_token=3,
)
"""The DSpark that DeepSeek-V4.1-Flash has attached."""

GLM_PRESETS: dict[str, GlmConfig] = {"glm-5.3": GLM_5_3, "tiny": TINY}
"""What can be trained here."""

PRESETS: dict[str, GlmConfig | V4Config | V41Config] = {
    **GLM_PRESETS,
    "deepseek-v3.2": DEEPSEEK_V3_2,
    "deepseek-v4-flash": DEEPSEEK_V4_FLASH,
    "deepseek-v4-pro": DEEPSEEK_V4_PRO,
    "deepseek-v4.1-flash": DEEPSEEK_V4_1_FLASH,
}
"""All presets, by their names."""
