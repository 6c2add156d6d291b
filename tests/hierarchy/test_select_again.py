"""Pools with rates of their own, and several selections from one, against plain lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.errors import UserError
from dhisparse_jax.geometry import Candidates, Geometry, RowFormat
from dhisparse_jax.hierarchy import init, requests
from dhisparse_jax.hierarchy.candidates import candidate_blocks
from dhisparse_jax.hierarchy.group import attend, close_group, open_group, select_again
from dhisparse_jax.hierarchy.invariants import check_invariants
from dhisparse_jax.hierarchy.select import IndexInputs
from dhisparse_jax.step import finish_step

RATES, SELECTIONS = (3, 2, 1), (1, 1, 3)
"""Positions per record of each pool, and how often it is selected from in a step."""
WIDTH, INDEX, HEADS, K = 4, 3, 2, 3
BLOCK, COUNT = 2, 3
GEOMETRY = Geometry(
    row=RowFormat(width=WIDTH, value_width=WIDTH, dtype="float32"),
    layers_per_pool=(1, 1, 1),
    top_k=K,
    index_width=INDEX,
    index_dtype="float32",
    scale=1.0,
    rates=RATES,
    candidates=(None, None, Candidates(block=BLOCK, count=COUNT)),
)
CAPACITY, STEPS = 47, 26


def config(policy, hot_rows, queries):
    return HierarchyConfig(
        geometry=GEOMETRY,
        policy=Policy(policy),
        requests=2,
        capacity=CAPACITY,
        queries=queries,
        hot_rows=hot_rows,
        tail=2 * queries,
        host_page=6,
    )


class Life:
    """A hierarchy, and lists of everything that was written to each record."""

    def __init__(self, cfg):
        self.cfg, self.rng = cfg, np.random.default_rng(0)
        self.state = init(cfg)
        for row in range(cfg.requests):
            self.state = requests.join(self.state, cfg, jnp.int32(row), jnp.int32(0))
        self.length = np.zeros(cfg.requests, int)
        self.rows = [np.zeros((cfg.requests, CAPACITY, WIDTH), np.float32) for _ in RATES]
        self.keys = [np.zeros((cfg.requests, CAPACITY, INDEX), np.float32) for _ in RATES]
        self._step = jax.jit(self._run, donate_argnums=0)

    def draw(self, *shape):
        return self.rng.normal(size=(self.cfg.requests, *shape)).astype(np.float32)

    def step(self):
        """One step of all pools; what was attended to must be what the lists say."""
        cfg, t = self.cfg, self.cfg.queries
        inputs = [
            (
                self.draw(cfg.fresh(pool), WIDTH),
                self.draw(cfg.fresh(pool), INDEX),
                [(self.draw(t, HEADS, INDEX), self.draw(t, HEADS)) for _ in range(count)],
                self.draw(t, HEADS, WIDTH),
            )
            for pool, count in enumerate(SELECTIONS)
        ]
        room = CAPACITY - self.length
        live = np.minimum(room, t).astype(np.int32)
        accepted = np.minimum(self.rng.integers(1, t + 1, cfg.requests), room).astype(np.int32)
        found, counts, self.state = self._step(self.state, inputs, accepted, live)
        for pool, (rows, keys, indices, query) in enumerate(inputs):
            self._write(pool, rows, keys)
            fetched = self._compare(pool, indices, query, found[pool], live)
            assert counts.selected[pool].tolist() == fetched
        self.length += accepted
        report = check_invariants(self.state, cfg)
        assert [name for name, holds in report.items() if not holds] == []
        return int(counts.fetched.sum())

    def _run(self, state, inputs, accepted, live):
        cfg, found = self.cfg, []
        for pool, (rows, keys, indices, query) in enumerate(inputs):
            values = []
            for number, (queries, weights) in enumerate(indices):
                index = inputs_of(queries, weights, None if number else keys)
                if number:
                    group = select_again(group, cfg, pool, index, live)
                else:
                    group = open_group(state, cfg, pool, index, live)
                attended, group = attend(group, cfg, pool, 0, None if number else rows, query)
                again, group = attend(group, cfg, pool, 0, None, query)  # a layer that shares all
                values.append((attended.values, again.values, group.selection))
            state = close_group(group, cfg, pool)
            found.append(values)
        return found, state.counts, finish_step(state, cfg, accepted)

    def _write(self, pool, rows, keys):
        for request, length in enumerate(self.length):
            first = length // RATES[pool]
            most = min(rows.shape[1], CAPACITY - first)
            self.rows[pool][request, first : first + most] = rows[request, :most]
            self.keys[pool][request, first : first + most] = keys[request, :most]

    def _compare(self, pool, indices, query, found, live):
        """How many records each request's selections have, each counted once per selection."""
        selected = np.zeros(self.cfg.requests, int)
        for request in range(self.cfg.requests):
            blocks = [None] * self.cfg.queries
            for (queries, weights), (values, again, selection) in zip(indices, found, strict=True):
                union = set()
                for q in range(live[request]):
                    count = (self.length[request] + q + 1) // RATES[pool]
                    dots = queries[request, q] @ self.keys[pool][request, :count].T
                    scores = weights[request, q] @ np.maximum(dots, 0.0)
                    if pool == 2 and blocks[q] is None:
                        blocks[q] = best_blocks(scores)
                    elif pool == 2:
                        outside = ~np.isin(np.arange(count) // BLOCK, blocks[q])
                        scores[outside] = -np.inf
                    order = np.argsort(-scores, kind="stable")[:K]
                    mine = np.sort(order[scores[order] > -np.inf])
                    theirs = selection[request, q]
                    assert theirs[theirs >= 0].tolist() == mine.tolist()
                    expected = attention(query[request, q], self.rows[pool][request, mine])
                    assert np.abs(values[request, q] - expected).max() < 1e-5
                    assert np.array_equal(values[request, q], again[request, q])
                    union |= set(mine.tolist())
                selected[request] += len(union)
        return selected.tolist()


def inputs_of(queries, weights, keys):
    return IndexInputs(queries=queries, weights=weights, keys=keys)


def best_blocks(scores):
    """Numbers of the blocks with the best records, and the newest one."""
    of_block = [max(scores[i : i + BLOCK]) for i in range(0, len(scores), BLOCK)]
    if not of_block:
        return []
    of_block[-1] = np.inf
    return np.argsort(-np.array(of_block), kind="stable")[:COUNT]


def attention(query, rows):
    if not len(rows):
        return np.zeros(query.shape)
    logits = query @ rows.T
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ rows


@pytest.mark.parametrize(
    ("policy", "hot_rows", "queries"),
    [
        ("fixed", 2, 3),
        pytest.param("fixed", 1, 1, marks=pytest.mark.slow),
        pytest.param("adaptive", 4, 3, marks=pytest.mark.slow),
        pytest.param("resident", 1, 3, marks=pytest.mark.slow),
    ],
)
def test_every_selection_attends_to_its_own_records(policy, hot_rows, queries):
    """Whatever one selection fetched, the next one of the pool may put others in its place."""
    life = Life(config(policy, hot_rows, queries))
    fetched = sum(life.step() for _ in range(STEPS))
    assert (fetched > 0) == (policy != "resident")
    assert life.length.max() > CAPACITY // 2


def test_sizes_follow_from_the_rates():
    cfg = config("resident", 1, 4)
    assert [cfg.records(pool) for pool in range(3)] == [15, 23, 47]
    assert [cfg.fresh(pool) for pool in range(3)] == [2, 2, 4]
    assert [cfg.page_records(pool) for pool in range(3)] == [2, 3, 6]
    assert [cfg.hot_slots(pool) for pool in range(3)] == [16, 32, 48]
    assert GEOMETRY.whole == 6
    shapes = [pool.host.shape[0] for pool in init(cfg).pools]
    assert shapes == [rows * cfg.host_page_count for rows in (2, 3, 6)]
    assert GEOMETRY.position_bytes == pytest.approx((16 + 12) * (1 / 3 + 1 / 2 + 1))


def test_the_newest_block_is_a_candidate_and_ties_go_to_the_lowest():
    rule = Candidates(block=2, count=2)
    scores = jnp.asarray([[[1.0, 5.0, 5.0, 0.0, -2.0, -jnp.inf, -jnp.inf]]])
    assert candidate_blocks(rule, scores, jnp.asarray([[5]])).tolist() == [[[0, 2]]]
    none = jnp.full((1, 1, 7), -jnp.inf)
    assert candidate_blocks(rule, none, jnp.asarray([[0]])).tolist() == [[[-1, -1]]]


def test_a_group_is_opened_with_keys_and_again_without():
    cfg = config("fixed", 2, 1)
    index = inputs_of(jnp.zeros((2, 1, 1, INDEX)), jnp.zeros((2, 1, 1)), None)
    with pytest.raises(UserError, match="needs the index keys"):
        open_group(init(cfg), cfg, 0, index)
    keys = inputs_of(index.queries, index.weights, jnp.zeros((2, 1, INDEX)))
    group = open_group(init(cfg), cfg, 0, keys)
    for again in (index, keys):
        with pytest.raises(UserError, match="without keys, when a layer has attended"):
            select_again(group, cfg, 0, again)
