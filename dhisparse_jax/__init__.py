"""Package dhisparse_jax."""
