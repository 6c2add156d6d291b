"""Typed presets: sizes of the models that the library can serve."""

from dhisparse_jax.configs.glm import (
    GLM_5_3,
    TINY,
    GlmConfig,
    config_from_values,
    derive_indexer_types,
)

PRESETS: dict[str, GlmConfig] = {"glm-5.3": GLM_5_3, "tiny": TINY}

__all__ = ["GLM_5_3", "PRESETS", "TINY", "GlmConfig", "config_from_values", "derive_indexer_types"]
