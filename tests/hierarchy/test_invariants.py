"""Every invariant can fail: a fault planted in a sound state makes exactly that name false."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.geometry import Geometry, RowFormat
from dhisparse_jax.hierarchy import layout, pages, requests
from dhisparse_jax.hierarchy.admit import admit_prompt
from dhisparse_jax.hierarchy.invariants import check_invariants
from dhisparse_jax.hierarchy.state import init
from dhisparse_jax.hierarchy.update import with_hot, with_pool

CONFIG = HierarchyConfig(
    geometry=Geometry(
        row=RowFormat(width=4, value_width=4, dtype="float32"),
        layers_per_pool=(1, 1),
        top_k=4,
        index_width=2,
        index_dtype="float32",
        scale=1.0,
    ),
    policy=Policy.ADAPTIVE,
    requests=3,
    capacity=32,
    hot_rows=12,
    tail=6,
    host_page=8,
)
PAGE = CONFIG.page_slots
LENGTHS = (30, 20)  # row 2 is free
BUDGETS = np.array([[4, 3, 0], [4, 3, 0]], np.int32)
HOST_PAGES = np.array([[0, 1, 2, 3], [0, 5, 6, 7]], np.int32)
"""Both rows begin with the same 8 positions."""


def _populate(state, prompts):
    for row, length in enumerate(LENGTHS):
        host_pages = jnp.asarray(HOST_PAGES[row])
        state = requests.join(state, CONFIG, jnp.int32(row), jnp.int32(length), host_pages)
    state = pages.set_budgets(state, CONFIG, jnp.asarray(BUDGETS))
    for row, pool in np.ndindex(prompts.shape[:2]):
        keys = jnp.zeros((CONFIG.capacity, 2))
        records = prompts[row, pool]
        state = admit_prompt(state, CONFIG, pool, jnp.int32(row), records, keys)
    return state


@pytest.fixture(scope="module")
def sound():
    """Two requests with 4 and 3 pages in each of two pools and a common host page, in NumPy."""
    shape = (len(LENGTHS), CONFIG.pools, CONFIG.capacity, 32)
    prompts = np.random.default_rng(0).integers(1, 1000, shape, np.int32)
    prompts[1, :, : CONFIG.host_page] = prompts[0, :, : CONFIG.host_page]
    return jax.device_get(jax.jit(_populate)(init(CONFIG), prompts))


def changed(array, index, value):
    array = array.copy()
    array[index] = value
    return array


def host_row(row, position):
    page, place = divmod(position, CONFIG.host_page)
    return HOST_PAGES[row, page] * CONFIG.host_page + place


def hot_slot(state, row=0):
    """Some slot that row `row` fills in pool 0, and the position in it."""
    position = int(np.flatnonzero(state.pools[0].slot_of[row] >= 0)[0])
    return int(state.pools[0].slot_of[row, position]), position


def with_hot_field(state, name, index, value):
    hot = state.hot[0]
    new = changed(getattr(hot, name), index, value)
    return with_hot(state, 0, dataclasses.replace(hot, **{name: new}))


def with_budget(state, budget):
    """Budgets below the floor or for nobody, with pages and tables that follow."""
    release = jax.jit(lambda state, target: pages.set_budgets(state, CONFIG, target))
    return jax.device_get(release(state, budget))


def free_page_with_an_owner(state):
    free = np.flatnonzero(state.hot[0].owner < 0)[0]
    return with_hot_field(state, "owner", free, 0)


def held_page_without_an_owner(state):
    held = state.pools[0].pages[0, 3]
    # The last page of the request is emptied first: only its owner is missing then.
    slots = slice(held * PAGE, (held + 1) * PAGE)
    slot_of = state.pools[0].slot_of
    gone = (slot_of >= slots.start) & (slot_of < slots.stop)
    state = with_pool(state, 0, slot_of=np.where(gone, -1, slot_of))
    left = state.hot_records[0] - gone.sum(axis=1)
    state = dataclasses.replace(state, hot_records=changed(state.hot_records, 0, left))
    state = with_hot_field(state, "position", slots, -1)
    return with_hot_field(state, "owner", held, -1)


def page_in_two_lists(state):
    """Row 1 swaps its emptied last page for the one that row 0 holds."""
    state = with_budget(state, BUDGETS - np.array([[0, 1, 0], [0, 0, 0]], np.int32))
    held = state.pools[0].pages
    state = with_pool(state, 0, pages=changed(held, (1, 2), held[0, 0]))
    return dataclasses.replace(state, budget=BUDGETS)


def budget_above_the_pages(state):
    return dataclasses.replace(state, budget=changed(state.budget, (1, 0), 5))


def hole_in_the_page_list(state):
    """The last page of row 0 is one column too far to the right."""
    held = state.pools[0].pages
    return with_pool(state, 0, pages=changed(held, (0, slice(3, 5)), held[0, [4, 3]]))


def below_the_floor(state):
    return with_budget(state, changed(BUDGETS, (0, 1), CONFIG.floor_pages(0) - 1))


def pages_for_nobody(state):
    return with_budget(state, changed(BUDGETS, (0, 2), 1))


def lost_position(state):
    _, position = hot_slot(state)
    return with_pool(state, 0, slot_of=changed(state.pools[0].slot_of, (0, position), -1))


def slot_with_a_wrong_position(state):
    slot, position = hot_slot(state)
    return with_hot_field(state, "position", slot, position + 1)


def slot_of_a_free_page_in_use(state):
    free = np.flatnonzero(state.hot[0].owner < 0)[0] * PAGE
    return with_hot_field(state, "position", free, 1)


def page_given_away_with_its_records(state):
    """The last page of row 0 goes to row 1 in every table but `slot_of`."""
    page = state.pools[0].pages[0, 3]
    held = changed(changed(state.pools[0].pages, (0, 3), -1), (1, 3), page)
    state = with_pool(state, 0, pages=held)
    state = dataclasses.replace(state, budget=changed(changed(state.budget, (0, 0), 3), (0, 1), 4))
    return with_hot_field(state, "owner", page, 1)


def position_beyond_the_length(state):
    """A rejected row with a slot, equal to what the host has there."""
    slot, position = hot_slot(state, row=1)
    beyond = LENGTHS[1] + 1
    slot_of = changed(changed(state.pools[0].slot_of, (1, position), -1), (1, beyond), slot)
    state = with_pool(state, 0, slot_of=slot_of)
    state = with_hot_field(state, "position", slot, beyond)
    return with_hot_field(state, "slots", slot, state.pools[0].host[host_row(1, beyond)])


def one_bit_of_a_hot_record(state):
    slot, _ = hot_slot(state)
    word = state.hot[0].slots[slot, 31]
    return with_hot_field(state, "slots", (slot, 31), word ^ 1)


def one_bit_of_a_host_record(state):
    _, position = hot_slot(state)
    host, row = state.pools[0].host, host_row(0, position)
    return with_pool(state, 0, host=changed(host, (row, 0), host[row, 0] ^ 1))


def one_bit_of_a_tail_record(state):
    slot = int(layout.tail_slot(CONFIG, 1, jnp.int32(1), jnp.int32(LENGTHS[1] - 1)))
    word = state.hot[0].slots[slot, 0]
    return with_hot_field(state, "slots", (slot, 0), word ^ 1)


def record_not_backed_up(state):
    newest = host_row(1, LENGTHS[1] - 1)
    return with_pool(state, 1, host=changed(state.pools[1].host, newest, 0))


def one_bit_of_an_index_key(state):
    keys = state.pools[1].index_keys.copy()
    keys.view(np.int32)[1, LENGTHS[1] - 1, 1] ^= 1
    return with_pool(state, 1, index_keys=keys)


def with_host_page(state, row, column, page):
    return dataclasses.replace(state, host_page_of=changed(state.host_page_of, (row, column), page))


def positions_without_a_host_page(state):
    return with_host_page(state, 1, 2, -1)


def host_page_that_does_not_exist(state):
    return with_host_page(state, 1, 3, CONFIG.host_page_count)


def host_page_of_nobody(state):
    return with_host_page(state, 2, 0, 9)


def host_page_twice(state):
    return with_host_page(state, 1, 3, state.host_page_of[1, 2])


def host_page_that_two_will_write(state):
    return with_host_page(state, 1, 3, state.host_page_of[0, 3])


def length_of_nobody(state):
    return dataclasses.replace(state, length=changed(state.length, 2, 1))


def length_below_zero(state):
    """Of a row that has nothing on the device, so that only the length is wrong."""
    leave = jax.jit(lambda state: requests.leave(state, CONFIG, jnp.int32(1)))
    return dataclasses.replace(jax.device_get(leave(state)), length=changed(state.length, 1, -1))


def mark_of_this_step(state):
    slot, _ = hot_slot(state)
    return with_hot_field(state, "mark", slot, state.step)


def with_ghosts(state, row, *positions):
    ghost = state.benefit.ghost.copy()
    ghost[0, row, : len(positions)] = positions
    return dataclasses.replace(state, benefit=dataclasses.replace(state.benefit, ghost=ghost))


def absent(state, row=0):
    """Some positions of a row without a slot."""
    return np.flatnonzero(state.pools[0].slot_of[row, : LENGTHS[row]] < 0)[:2].tolist()


def ghost_with_a_slot(state):
    return with_ghosts(state, 0, hot_slot(state)[1])


def ghost_twice(state):
    position, _ = absent(state)
    return with_ghosts(state, 0, position, position)


def ghost_after_a_hole(state):
    return with_ghosts(state, 0, -1, *absent(state))


def ghost_beyond_the_length(state):
    return with_ghosts(state, 1, LENGTHS[1])


def ghost_of_nobody(state):
    return with_ghosts(state, 2, 0)


FAULTS = {
    free_page_with_an_owner: "pages_partitioned",
    page_in_two_lists: "pages_partitioned",
    budget_above_the_pages: "budget_is_held",
    hole_in_the_page_list: "budget_is_held",
    below_the_floor: "floor_kept",
    pages_for_nobody: "floor_kept",
    lost_position: "maps_agree",
    slot_with_a_wrong_position: "maps_agree",
    slot_of_a_free_page_in_use: "maps_agree",
    held_page_without_an_owner: "pages_partitioned",
    page_given_away_with_its_records: "slots_owned",
    position_beyond_the_length: "hot_is_committed",
    one_bit_of_a_hot_record: "hot_equals_host",
    one_bit_of_a_host_record: "hot_equals_host",
    one_bit_of_a_tail_record: "tail_equals_host",
    record_not_backed_up: "tail_equals_host",
    one_bit_of_an_index_key: "keys_equal_host",
    positions_without_a_host_page: "host_pages_held",
    host_page_that_does_not_exist: "host_pages_held",
    host_page_of_nobody: "host_pages_held",
    host_page_twice: "host_pages_held",
    host_page_that_two_will_write: "shared_is_complete",
    length_of_nobody: "lengths_fit",
    length_below_zero: "lengths_fit",
    mark_of_this_step: "marks_past",
    ghost_with_a_slot: "ghosts_gone",
    ghost_twice: "ghosts_gone",
    ghost_after_a_hole: "ghosts_gone",
    ghost_beyond_the_length: "ghosts_gone",
    ghost_of_nobody: "ghosts_gone",
}


def failed(state):
    return [name for name, holds in check_invariants(state, CONFIG).items() if not holds]


def test_sound_state_holds_all(sound):
    assert failed(sound) == []
    assert failed(jax.device_get(init(CONFIG))) == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_makes_its_name_false(sound, fault):
    assert failed(fault(sound)) == [FAULTS[fault]]


def test_every_invariant_has_a_fault(sound):
    assert set(FAULTS.values()) == set(check_invariants(sound, CONFIG))
