"""Products of few rows with matrices of packed 4-bit numbers; see `api`."""
