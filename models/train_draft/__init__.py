"""Training of the bundled drafts: `python -m dhisparse_jax.models.train_draft --draft dflash2`."""
