"""Typed presets: sizes of the models that the library can serve."""

from dhisparse_jax.configs.glm import GlmConfig, config_from_values, derive_indexer_types
from dhisparse_jax.configs.presets import GLM_5_3, PRESETS, TINY

__all__ = ["GLM_5_3", "PRESETS", "TINY", "GlmConfig", "config_from_values", "derive_indexer_types"]
