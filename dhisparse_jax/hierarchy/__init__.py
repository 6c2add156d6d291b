"""The KV hierarchy: pure functions over one state pytree.

state       the pytree, its shapes, an empty one
layout      slot numbers: pages, tails and staging in one index space
update      replacing one part of the state
append      new index keys and rows
select      exact top-K over the whole history
plan        hits, misses, victims
retrieve    host records to hot slots
group       the two calls of an attention module: open_group, attend
commit      accepted positions become history
backup      committed records to the host pools
adapt       budgets from the load
pages       granting and releasing pages
requests    join, admit_prompt, leave
invariants  what must hold between steps
"""
