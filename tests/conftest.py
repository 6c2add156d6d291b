"""Strict JAX and shape checks for the whole suite; must run before the project is imported."""

import importlib.util
import os

# Several workers share a GPU where there is one.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jaxtyping

# Implicit broadcasting and promotion hide mistakes of shape and of precision.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Where beartype is missing the annotations stay unchecked, and everything else runs.
if importlib.util.find_spec("beartype"):
    jaxtyping.install_import_hook(["dhisparse_jax", "pallas_kernels"], "beartype.beartype")
