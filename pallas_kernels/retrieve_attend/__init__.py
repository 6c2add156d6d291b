"""Retrieval and sparse attention in one launch: the link and the matrix units at the same time."""
