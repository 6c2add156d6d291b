"""The KV hierarchy: pure functions over one state pytree.

state       the pytree, its shapes, an empty one
places      the state on devices, of one or of several
layout      slot numbers: pages, tails and staging in one index space
formats     rows and index keys as they are stored
update      replacing one part of the state
append      new index keys and rows
select      exact top-K over the whole history
candidates  blocks of records that one selection leaves to the next
plan        hits, misses, victims
kept        what layers keep beside records: the newest rows, and rows of all
retrieve    host records to hot slots
heads       attention over slots, for rows that heads share or have parts of
group       the calls of an attention module: open_group, attend, select_again, close_group
commit      accepted positions become history
backup      committed records to the host pools
ghost       what was evicted last, and the worth of a page
adapt       budgets from the load
pages       granting and releasing pages
requests    join and leave; reading what host pages hold
admit       a prompt, or what comes back from its host pages, onto the device
keys        index keys in host memory
invariants  what must hold between steps
"""

from dhisparse_jax.hierarchy.admit import admit_prompt as admit_prompt
from dhisparse_jax.hierarchy.admit import readmit as readmit
from dhisparse_jax.hierarchy.append import query_positions as query_positions
from dhisparse_jax.hierarchy.formats import stored_keys as stored_keys
from dhisparse_jax.hierarchy.formats import stored_rows as stored_rows
from dhisparse_jax.hierarchy.group import OpenGroup as OpenGroup
from dhisparse_jax.hierarchy.group import attend as attend
from dhisparse_jax.hierarchy.group import close_group as close_group
from dhisparse_jax.hierarchy.group import open_group as open_group
from dhisparse_jax.hierarchy.group import select_again as select_again
from dhisparse_jax.hierarchy.invariants import check_invariants as check_invariants
from dhisparse_jax.hierarchy.requests import join as join
from dhisparse_jax.hierarchy.requests import leave as leave
from dhisparse_jax.hierarchy.requests import recall as recall
from dhisparse_jax.hierarchy.requests import recall_keys as recall_keys
from dhisparse_jax.hierarchy.retrieve import Attended as Attended
from dhisparse_jax.hierarchy.state import HierarchyState as HierarchyState
from dhisparse_jax.hierarchy.state import abstract as abstract
from dhisparse_jax.hierarchy.state import init as init
