"""Making small matrices doubly stochastic; see `api`."""
