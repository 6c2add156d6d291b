"""One folder per operation: `api.py` (contract), `reference.py` (exact jnp), kernels, `cases.py`.

index_scores      relu-weighted indexer scores of T queries over the whole history
top_k             exact top-K of the scores, ties to the lowest position
plan              union of the selections, hit / tail / miss, victims, table updates
retrieve          host records to device slots, each once, exact bytes
backup            device slots to host records, in place
sparse_attention  attention of T queries over selected slots
retrieve_attend   retrieve and sparse_attention in one launch, for one query per request
round_rows        rows rounded to e4m3, with a scale each
sinkhorn          mixing matrices of residual streams, made doubly stochastic
packed_products   products of few rows with matrices of packed 4-bit numbers
draft_attention   attention of a draft's block over its ring
common            what kernels share: backends, memory spaces, layouts, ids, number formats

Knows arrays only: no configuration, no model, no state pytree.
"""
