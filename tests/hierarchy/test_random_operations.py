"""Long random lives of a hierarchy, every byte and every table compared with the NumPy model.

Selections are chosen here, not by index scores, so that they can be as unfriendly as they like.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.geometry import Geometry, RowFormat
from dhisparse_jax.hierarchy import pages, requests
from dhisparse_jax.hierarchy.admit import admit_prompt, readmit
from dhisparse_jax.hierarchy.append import append_keys, append_row
from dhisparse_jax.hierarchy.invariants import check_invariants
from dhisparse_jax.hierarchy.plan import plan
from dhisparse_jax.hierarchy.retrieve import retrieve
from dhisparse_jax.hierarchy.state import init
from dhisparse_jax.step import finish_step
from tests.hierarchy.numpy_model import Model
from tests.support.fp8 import row_words

OPERATIONS = 300

ROUNDING = 1e-4
"""Values that are nearer than this to each other need not compare alike in float32."""


def config(policy, hot_rows, queries, *, layers=(1, 2), top_k=4, dtype="float32", **sizes):
    geometry = Geometry(
        row=RowFormat(width=12, value_width=8, dtype=dtype),
        layers_per_pool=layers,
        top_k=top_k,
        index_width=2,
        index_dtype="float32",
        scale=1.0,
    )
    sizes = {"requests": 3, "capacity": 48, "tail": 6, **sizes}
    return HierarchyConfig(
        geometry=geometry, policy=Policy(policy), hot_rows=hot_rows, queries=queries, **sizes
    )


CONFIGS = {
    "resident": config("resident", 1, 1),
    "resident_verify": config("resident", 1, 3, capacity=45, layers=(2, 1, 3)),
    "fixed_one_slot": config("fixed", 1, 1, tail=2),
    "fixed_one_slot_verify": config("fixed", 1, 3, layers=(1, 4)),
    "fixed_less_than_k": config("fixed", 3, 1),
    "fixed_k": config("fixed", 4, 1, dtype="bfloat16"),
    "fixed_odd_verify": config("fixed", 7, 3, capacity=45),
    "fixed_working_set": config("fixed", 12, 3),
    "fixed_k_is_capacity": config("fixed", 5, 1, top_k=20, capacity=20),
    "fixed_all_but_one": config("fixed", 47, 1),
    "fixed_capacity": config("fixed", 48, 3),
    "adaptive_one_slot": config("adaptive", 1, 1),
    "adaptive_verify": config("adaptive", 6, 3, layers=(1, 4), moves_per_step=1),
    "adaptive_small_pages": config("adaptive", 6, 1, layers=(1, 4, 2)),
    "adaptive_verify_roomy": config("adaptive", 24, 3, capacity=45),
    "adaptive_many_requests": config("adaptive", 12, 1, requests=6, capacity=96),
    "fixed_small_host_pages": config("fixed", 7, 3, capacity=45, host_page=4, host_pages=27),
    "adaptive_host_page_of_one": config("adaptive", 6, 1, host_page=1, host_pages=100),
    "resident_odd_host_pages": config("resident", 1, 3, capacity=45, host_page=7),
    "fixed_fp8": config("fixed", 7, 3, dtype=RowFormat.fp8(8, 4).dtype),
    "adaptive_fp8": config("adaptive", 6, 1, dtype=RowFormat.fp8(8, 4, power_scales=True).dtype),
}


QUICK = {
    "fixed_one_slot_verify",
    "adaptive_verify",
}
"""Those that run by default: the least budget, and growth and release."""


class Compiled:
    """The calls of a test, each one program; states are donated."""

    def __init__(self, cfg):
        # Most of the time of this test is compilation, and LLVM's optimization is half of that.
        options = {"xla_backend_optimization_level": 0}
        jit = partial(jax.jit, donate_argnums=0, compiler_options=options)
        self.join = jit(partial(_join, cfg))
        self.come_back = jit(partial(_come_back, cfg))
        self.leave = jit(lambda state, row: requests.leave(state, cfg, row))
        self.step = jit(partial(_step, cfg))
        self.set_budgets = jit(lambda state, target: pages.set_budgets(state, cfg, target))


def _join(cfg, state, row, length, prompts, host_pages, shared):
    """A request joins, whose first positions are those of another one.

    What is shared is not taken from the prompts: it comes from the host pages `source`.
    """
    count, source, start = shared
    state = requests.join(state, cfg, row, length, host_pages)
    mine = jnp.arange(cfg.capacity) < count
    for pool, (records, keys) in enumerate(prompts):
        records = requests.recall(state, cfg, pool, source, count, records)
        known = requests.recall_keys(state, cfg, pool, source, count)
        keys = jnp.where(mine[:, None], known, keys)
        state = admit_prompt(state, cfg, pool, row, records, keys, start)
    return state


def _come_back(cfg, state, row, length, host_pages):
    """A request joins whose pages have all that it needs."""
    state = requests.join(state, cfg, row, length, host_pages)
    for pool in range(cfg.pools):
        state = readmit(state, cfg, pool, row)
    return state


def _step(cfg, state, selections, rows, keys, accepted):
    """One decode step with given selections; also the records found where the plans point."""
    seen = []
    for pool in range(cfg.pools):
        state = append_keys(state, cfg, pool, keys[pool])
        planned, state = plan(state, cfg, pool, selections[pool])
        state = retrieve(state, cfg, pool, planned)
        for layer in range(cfg.geometry.layers_per_pool[pool]):
            state = append_row(state, cfg, pool, layer, rows[pool][layer])
        slots = state.hot[cfg.hot_pool_of(pool)[0]].slots
        seen.append((planned, slots[jnp.maximum(planned.location, 0)]))
    return seen, finish_step(state, cfg, accepted)


class Lockstep:
    """A library state and its model, moved by the same calls."""

    def __init__(self, cfg, seed):
        self.cfg, self.compiled = cfg, Compiled(cfg)
        self.state, self.model = init(cfg), Model(cfg)
        self.rng = np.random.default_rng(seed)
        self.shared = self.moved = 0
        # What every position was last given, whether it was accepted or not.
        shape = (cfg.requests, cfg.capacity + cfg.queries)
        self.records = [np.zeros((*shape, words), np.int32) for words in self.model.sizes.words]
        self.keys = np.zeros((cfg.pools, *shape, 2), np.float32)

    # Random material

    def rows(self, *shape):
        row = self.cfg.geometry.row
        rows = self.rng.normal(size=(*shape, row.width))
        return rows.astype(row.dtype if isinstance(row.dtype, str) else np.float32)

    def words(self, rows):
        form = self.cfg.geometry.row.dtype
        return rows.view(np.int32) if isinstance(form, str) else row_words(rows, form)

    def _prompt(self, pool, row, length, donor, count):
        """Records and keys by position; what is shared or beyond the length must not matter."""
        cfg, layers = self.cfg, self.cfg.geometry.layers_per_pool[pool]
        words = self.words(self.rows(cfg.capacity, layers)).reshape(cfg.capacity, -1)
        padding = self.model.sizes.words[pool] - words.shape[1]
        records = np.pad(words, ((0, 0), (0, padding)))
        keys = self.rng.normal(size=(cfg.capacity, 2)).astype(np.float32)
        self.records[pool][row, :count] = self.records[pool][donor, :count]
        self.records[pool][row, count:length] = records[count:length]
        self.keys[pool, row, :count] = self.keys[pool, donor, :count]
        self.keys[pool, row, count:length] = keys[count:length]
        return records, keys

    def _host_pages(self, length):
        """Random free pages for a whole row, whose first ones may be those of a donor.

        Returns:
            The pages, the donor, how many positions are its own too, and how many of them are in
            pages of both.
        """
        s, rng = self.model.sizes, self.rng
        rows = [row for row in range(s.requests) if self.model.active[row]]
        donor = int(rng.choice(rows)) if rows and rng.random() < 0.7 else 0
        most = min(length - 1, self.model.length[donor])
        count = int(rng.integers(0, most + 1))
        common = self.model.host_pages[donor][: count // s.host_page]
        used = {page for pages in self.model.host_pages for page in pages}
        free = [page for page in range(s.host_pages) if page not in used]
        fresh = rng.permutation(free)[: self.cfg.row_pages - len(common)]
        return [*common, *fresh.tolist()], donor, count, len(common) * s.host_page

    # Calls

    def join(self, row, length):
        cfg, model = self.cfg, self.model
        host_pages, donor, count, start = self._host_pages(length)
        if len(host_pages) < cfg.row_pages:
            return
        self.shared += count > 0
        source = np.full(cfg.row_pages, -1, np.int32)
        source[: len(model.host_pages[donor])] = model.host_pages[donor]
        prompts = [self._prompt(pool, row, length, donor, count) for pool in range(cfg.pools)]
        self.state = self.compiled.join(
            self.state,
            np.int32(row),
            np.int32(length),
            prompts,
            np.array(host_pages, np.int32),
            (np.int32(count), source, np.int32(start)),
        )
        model.join(row, length, host_pages, self._admission(row, length))
        for pool in range(cfg.pools):
            model.admit(pool, row, self.records[pool][row], start)
        self.compare()

    def leave(self, row):
        self.state = self.compiled.leave(self.state, np.int32(row))
        self.model.leave(row)
        self.compare()

    def move(self, row):
        """A request leaves with its pages, and comes back to any free row."""
        cfg, model = self.cfg, self.model
        length, host_pages = model.length[row], list(model.host_pages[row])
        self.leave(row)
        new = int(self.rng.choice(np.flatnonzero(~np.array(model.active))))
        table = np.full(cfg.row_pages, -1, np.int32)
        table[: len(host_pages)] = host_pages
        self.state = self.compiled.come_back(self.state, np.int32(new), np.int32(length), table)
        budgets = self._admission(new, length)
        model.join(new, length, host_pages, budgets)
        self.keys[:, new] = self.keys[:, row]
        for pool in range(cfg.pools):
            self.records[pool][new] = self.records[pool][row]
            model.admit(pool, new, self.records[pool][new], length)
        self.moved += 1
        self.compare()

    def _admission(self, row, length):
        """The budgets after an admission, checked; None where they follow from the policy."""
        if not self.model.sizes.adaptive:
            return None
        budgets = np.asarray(self.state.budget).tolist()
        check_admission(self.model, row, budgets, self.model.admission(row, length))
        return budgets

    def set_budgets(self, target):
        self.state = self.compiled.set_budgets(self.state, np.array(target, np.int32))
        self.model.set_budgets(target)
        self.compare()

    def step(self, select):
        """`select(request, visible)` gives the positions of one query."""
        cfg, model = self.cfg, self.model
        shape = (cfg.requests, cfg.queries)
        selections = [self._selection(select) for _ in range(cfg.pools)]
        rows = [self.rows(layers, *shape) for layers in cfg.geometry.layers_per_pool]
        keys = self.rng.normal(size=(cfg.pools, *shape, 2)).astype(np.float32)
        room = cfg.capacity - np.array(model.length)
        accepted = np.minimum(self.rng.integers(1, cfg.queries + 1, cfg.requests), room)
        accepted = accepted.astype(np.int32)
        before = model.budgets()
        seen, self.state = self.compiled.step(self.state, selections, rows, list(keys), accepted)
        seen = jax.device_get(seen)
        selected, fetched = np.zeros((2, cfg.pools, cfg.requests))
        for pool, (planned, records) in enumerate(seen):
            for row in range(cfg.requests):
                of_row = jax.tree.map(lambda leaf, row=row: leaf[row], planned)
                if not model.active[row]:
                    check_untouched(of_row)
                    continue
                selection = selections[pool][row]
                expected = model.plan(pool, row, [q[q >= 0].tolist() for q in selection])
                self._append(pool, row, rows[pool], keys[pool])
                check_plan(of_row, selection, expected)
                self._check_records(pool, row, selection, records[row])
                selected[pool, row] = len(expected.location)
                fetched[pool, row] = len(expected.fetch)
        model.commit(accepted)
        model.control.learn(selected, fetched, np.array(model.active))
        self._follow_budgets(before)
        self.compare()
        return seen

    def _selection(self, select):
        cfg, model = self.cfg, self.model
        selection = np.full((cfg.requests, cfg.queries, cfg.geometry.top_k), -1, np.int32)
        for row, query in np.ndindex(cfg.requests, cfg.queries):
            if model.active[row]:
                visible = min(model.length[row] + query + 1, cfg.capacity)
                picked = np.array(select(row, query, visible), np.int32)
                selection[row, query, : len(picked)] = picked
        return selection

    def _append(self, pool, row, rows, keys):
        """The new rows of one request, in the model and in the list of what was written."""
        for query in range(self.cfg.queries):
            position = self.model.length[row] + query
            words = self.words(rows[:, row, query].copy())
            for layer in range(len(words)):
                self.model.append(pool, row, query, layer, words[layer])
            self.records[pool][row, position, : words.size] = words.reshape(-1)
            self.keys[pool, row, position] = keys[row, query]

    def _follow_budgets(self, before):
        """Check what `adapt` may do, then do it in the model too."""
        after = np.asarray(self.state.budget)
        if self.model.sizes.adaptive:
            expected, margin = self.model.control.adapted(self.model)
            check_adaptation(self.model, np.array(before), after)
            assert after.tolist() == expected or margin < ROUNDING
        else:
            np.testing.assert_array_equal(after, before)
        if after.tolist() != before:  # else the library leaves its page lists alone
            self.model.set_budgets(after.tolist())

    # Comparison

    def _check_records(self, pool, row, selection, records):
        """Where the plan points, there are the bytes that were written for the position."""
        chosen = selection >= 0
        wanted = self.records[pool][row, selection[chosen]]
        np.testing.assert_array_equal(records[chosen], wanted)

    def compare(self):
        state, model, cfg = jax.device_get(self.state), self.model, self.cfg
        failed = [name for name, holds in check_invariants(state, cfg).items() if not holds]
        assert not failed
        assert state.length.tolist() == model.length
        assert state.active.tolist() == model.active
        assert state.step == model.step
        assert state.budget.tolist() == model.budgets()
        for hot, pool in enumerate(state.hot):
            np.testing.assert_array_equal(pool.slots, model.slots[hot])
        for pool in range(cfg.pools):
            np.testing.assert_array_equal(state.pools[pool].host, model.host[pool])
            for row in range(cfg.requests):
                self._compare_residency(state, pool, row)
        for name in ("miss_rate", "tried", "saved"):
            mine = getattr(model.control, name)
            found = state.miss_rate if name == "miss_rate" else getattr(state.benefit, name)
            np.testing.assert_allclose(found, mine, rtol=1e-4, atol=1e-6, err_msg=name)
            # Rounded alike from here on, so that what ties here ties there.
            setattr(model.control, name, np.array(found, np.float64))

    def _compare_residency(self, state, pool, row):
        held, mine = self.model.held[pool, row], state.pools[pool]
        hot = state.hot[self.model.sizes.hot_of(pool)]
        table = np.full(self.cfg.capacity, -1)
        table[list(held.slot_of)] = list(held.slot_of.values())
        np.testing.assert_array_equal(mine.slot_of[row], table)
        assert [page for page in mine.pages[row] if page >= 0] == held.pages
        if state.benefit.ghost is None:
            assert self.cfg.ghosts == 0
        else:
            ghosts = state.benefit.ghost[pool, row]
            assert ghosts[ghosts >= 0].tolist() == self.model.control.ghosts[pool, row]
        for position, slot in held.slot_of.items():
            assert hot.position[slot] == position
            assert hot.mark[slot] == held.mark[slot]
        length = self.model.length[row]
        np.testing.assert_array_equal(mine.index_keys[row, :length], self.keys[pool, row, :length])


def pairs(positions, slots):
    """The moves of a plan as a dictionary; every position and every slot once."""
    moves = {p: s for p, s in zip(positions.tolist(), slots.tolist(), strict=True) if p >= 0}
    assert len(moves) == (positions >= 0).sum()
    assert len(set(moves.values())) == len(moves)
    assert ((slots >= 0) == (positions >= 0)).all()
    return moves


def check_plan(planned, selection, expected):
    location = [[expected.location.get(p, -1) for p in query] for query in selection.tolist()]
    np.testing.assert_array_equal(planned.location, location)
    assert pairs(planned.fetch_position, planned.fetch_slot) == expected.fetch
    assert pairs(planned.retire_position, planned.retire_slot) == expected.retire
    counts = (len(expected.location), expected.hits, expected.tails, len(expected.fetch))
    assert tuple(planned.counts) == (*counts, expected.staged)


def check_untouched(planned):
    assert (planned.location == -1).all()
    assert (planned.fetch_position == -1).all() and (planned.fetch_slot == -1).all()
    assert (planned.retire_position == -1).all() and (planned.retire_slot == -1).all()
    assert not any(planned.counts)


def check_adaptation(model, before, after):
    """The stated bounds of adaptive residency, from the budgets before and after one step."""
    sizes = model.sizes
    change = after - before
    for hot, members in enumerate(sizes.hot):
        moved = change[members]
        assert np.maximum(moved, 0).sum() <= sizes.moves_per_step
        assert np.maximum(-moved, 0).sum() <= sizes.moves_per_step
        assert after[members].sum() <= sizes.pages(hot)
    for row in range(sizes.requests):
        if model.active[row]:
            assert (after[:, row] >= sizes.floor).all()
            grown = change[:, row] > 0
            assert (after[grown, row] <= model.useful(row)).all()
        else:
            assert (after[:, row] == 0).all()


def check_admission(model, row, found, expected):
    """The newcomer gets exactly its share; the others, rounded in another way, all but a page."""
    sizes = model.sizes
    assert np.array(found)[:, row].tolist() == np.array(expected)[:, row].tolist()
    assert np.abs(np.array(found) - np.array(expected)).max() <= 1
    for hot, members in enumerate(sizes.hot):
        assert np.array(found)[members].sum() <= sizes.pages(hot)
    assert (np.array(found)[:, np.array(model.active)] >= sizes.floor).all()
    assert (np.array(found) <= np.maximum(model.budgets(), np.array(found)[:, [row]])).all()


# Selections: functions of (row, query, visible), drawn anew for every step.


def scattered(rng, top_k, step):
    return lambda row, query, visible: rng.permutation(visible)[:top_k]


def all_new(rng, top_k, step):
    """Sweep the history, every query another stretch: nothing is seen twice for a long time."""

    def select(row, query, visible):
        start = (step * 3 + query) * top_k
        return np.arange(start, start + min(top_k, visible)) % visible

    return select


def alternating(rng, top_k, step):
    """Two sets in turn, each as large as the working set."""
    return lambda row, query, visible: np.arange(step % 2, visible, 2)[: 2 * top_k : 2][:top_k]


def newest(rng, top_k, step):
    return lambda row, query, visible: np.arange(visible)[::-1][:top_k]


def oldest(rng, top_k, step):
    return lambda row, query, visible: np.arange(visible)[:top_k]


def repeating(rng, top_k, step):
    """The same position several times in one query and in all of them."""
    return lambda row, query, visible: rng.integers(0, min(visible, 3), top_k)


def holes(rng, top_k, step):
    """NO_SLOT anywhere, also in front."""

    def select(row, query, visible):
        picked = rng.integers(0, visible, top_k)
        return np.where(rng.random(top_k) < 0.5, picked, -1)

    return select


def nothing(rng, top_k, step):
    return lambda row, query, visible: []


SELECTIONS = [scattered, all_new, alternating, newest, oldest, repeating, holes, nothing]


def lengths(cfg):
    """Prompt lengths at every edge."""
    k, page, tail = cfg.geometry.top_k, cfg.page_slots, cfg.tail
    edges = {1, k - 1, k, k + 1, tail - 1, tail, tail + 1, tail + page, tail + page + 1}
    edges |= {tail + cfg.hot_slots(0), cfg.capacity // 2, cfg.capacity - 1, cfg.capacity}
    return sorted(n for n in edges if 1 <= n <= cfg.capacity)


def random_budgets(life):
    """Any budgets that keep the floors and fit."""
    sizes, rng = life.model.sizes, life.rng
    target = np.zeros((len(sizes.words), sizes.requests), np.int32)
    for hot, members in enumerate(sizes.hot):
        rows = [(pool, row) for pool in members for row in np.flatnonzero(life.model.active)]
        free = sizes.pages(hot) - len(rows) * sizes.floor
        for pool, row in rng.permutation(rows) if rows else []:
            extra = rng.integers(0, min(free, sizes.max_pages - sizes.floor) + 1)
            target[pool, row] = sizes.floor + extra
            free -= extra
    return target.tolist()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CONFIGS],
)
def test_equals_model(name):
    cfg = CONFIGS[name]
    life = Lockstep(cfg, seed=sum(map(ord, name)))
    rng = life.rng
    style, steps = SELECTIONS[0], 0
    for number in range(OPERATIONS):
        full = [row for row in range(cfg.requests) if life.model.length[row] == cfg.capacity]
        free = [row for row in range(cfg.requests) if not life.model.active[row]]
        if full:
            life.leave(full[0])
        elif free and rng.random() < 0.15:
            life.join(rng.choice(free), rng.choice(lengths(cfg)))
        elif len(free) < cfg.requests and rng.random() < 0.02:
            life.leave(rng.choice(np.flatnonzero(life.model.active)))
        elif len(free) < cfg.requests and rng.random() < 0.04:
            life.move(rng.choice(np.flatnonzero(life.model.active)))
        elif cfg.policy is Policy.ADAPTIVE and rng.random() < 0.05:
            life.set_budgets(random_budgets(life))
        else:
            if number % 10 == 0:
                style = rng.choice(SELECTIONS)
            steps += 1
            life.step(style(rng, cfg.geometry.top_k, steps))
    assert steps > OPERATIONS // 3
    assert life.shared > 0
    assert life.moved > 0
