"""Rows rounded to 8 bits, each with a scale of its own; see `api`."""
