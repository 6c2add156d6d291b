"""Typed presets: sizes of the models that the library can serve."""

from dhisparse_jax.configs.deepseek_v4 import V4Config
from dhisparse_jax.configs.deepseek_v41 import V41Config
from dhisparse_jax.configs.glm import GlmConfig, config_from_values, derive_indexer_types
from dhisparse_jax.configs.presets import (
    DEEPSEEK_V3_2,
    DEEPSEEK_V4_1_FLASH,
    DEEPSEEK_V4_FLASH,
    DEEPSEEK_V4_PRO,
    GLM_5_3,
    GLM_PRESETS,
    PRESETS,
    TINY,
)

__all__ = [
    "DEEPSEEK_V3_2",
    "DEEPSEEK_V4_1_FLASH",
    "DEEPSEEK_V4_FLASH",
    "DEEPSEEK_V4_PRO",
    "GLM_5_3",
    "GLM_PRESETS",
    "PRESETS",
    "TINY",
    "GlmConfig",
    "V4Config",
    "V41Config",
    "config_from_values",
    "derive_indexer_types",
]
