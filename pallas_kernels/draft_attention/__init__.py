"""Attention of a draft's block over its ring; see `api`."""
