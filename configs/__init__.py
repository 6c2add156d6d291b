"""Typed presets: sizes of the models that the library can serve."""

from dhisparse_jax.configs.deepseek_v4 import DEEPSEEK_V4_FLASH, DEEPSEEK_V4_PRO, V4Config
from dhisparse_jax.configs.glm import (
    GLM_5_3,
    TINY,
    GlmConfig,
    config_from_values,
    derive_indexer_types,
)

GLM_PRESETS: dict[str, GlmConfig] = {"glm-5.3": GLM_5_3, "tiny": TINY}
"""What can be trained here."""

PRESETS: dict[str, GlmConfig | V4Config] = {
    **GLM_PRESETS,
    "deepseek-v4-flash": DEEPSEEK_V4_FLASH,
    "deepseek-v4-pro": DEEPSEEK_V4_PRO,
}

__all__ = [
    "DEEPSEEK_V4_FLASH",
    "DEEPSEEK_V4_PRO",
    "GLM_5_3",
    "GLM_PRESETS",
    "PRESETS",
    "TINY",
    "GlmConfig",
    "V4Config",
    "config_from_values",
    "derive_indexer_types",
]
