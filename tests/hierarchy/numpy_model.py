"""An independent model of the hierarchy: plain loops over dictionaries and lists, NumPy for bytes.

Written from the design and from the contracts in the docstrings, not from the code, and importing
nothing of the library: a mistake would have to be made twice. It keeps every byte of the host pools
and of the slots, so a test can compare all of them, read or not.
"""

import dataclasses
from collections import defaultdict

import numpy as np

from tests.hierarchy.numpy_adapt import LOW, Controller, shrunk


def ceil_div(a, b):
    return -(-a // b)


def row_bytes(row):
    """fp8 rows: a byte a number, 4 a scale, 2 each of the rest, in whole 8 bytes."""
    if isinstance(row.dtype, str):
        return row.width * {"float32": 4, "bfloat16": 2}[row.dtype]
    groups, rest = row.value_width // row.dtype.group, row.width - row.value_width
    return ceil_div(row.value_width + 4 * groups + 2 * rest, 8) * 8


class Sizes:
    """The sizes that follow from a configuration."""

    def __init__(self, cfg):
        self.requests, self.capacity = cfg.requests, cfg.capacity
        self.host_page, self.host_pages = cfg.host_page, cfg.host_page_count
        self.queries, self.top_k, self.tail = cfg.queries, cfg.geometry.top_k, cfg.tail
        self.layers = cfg.geometry.layers_per_pool
        row = cfg.geometry.row
        self.row_words = row_bytes(row) // 4
        # A record is the rows of all layers of the pool, padded to 128 bytes.
        self.words = [ceil_div(n * self.row_words * 4, 128) * 32 for n in self.layers]
        self.moves_per_step = cfg.moves_per_step
        self.adaptive = cfg.policy == "adaptive"
        whole = cfg.policy == "resident" or cfg.hot_rows >= cfg.capacity
        hot_slots = ceil_div(cfg.capacity, 16) * 16 if whole else cfg.hot_rows
        self.page = next(size for size in (16, 8, 4, 2, 1) if hot_slots % size == 0)
        self.share = hot_slots // self.page
        self.max_pages = ceil_div(cfg.capacity, self.page)
        working_set = cfg.queries * cfg.geometry.top_k
        self.floor = self.share
        if self.adaptive:
            self.floor = min(self.share, ceil_div(working_set, self.page))
        self.ghosts = 4 * self.page if self.adaptive else 0
        self.staging = max(0, working_set - self.floor * self.page)
        # Pools with the same record size share a hot pool; smaller records come first.
        self.hot = [
            [pool for pool, words in enumerate(self.words) if words == size]
            for size in sorted(set(self.words))
        ]

    def hot_of(self, pool):
        return next(number for number, members in enumerate(self.hot) if pool in members)

    def pages(self, hot):
        return len(self.hot[hot]) * self.requests * self.share

    def tails_start(self, hot):
        return self.pages(hot) * self.page

    def tail_slot(self, pool, request, position):
        """Slots are pages, then tails (pool by pool, request by request), then staging."""
        hot = self.hot_of(pool)
        ring = self.hot[hot].index(pool) * self.requests + request
        return self.tails_start(hot) + ring * self.tail + position % self.tail

    def staging_slot(self, pool, request, number):
        hot = self.hot_of(pool)
        first = self.tails_start(hot) + len(self.hot[hot]) * self.requests * self.tail
        return first + request * self.staging + number

    def slots(self, hot):
        tails = len(self.hot[hot]) * self.requests * self.tail
        return self.tails_start(hot) + tails + self.requests * self.staging


@dataclasses.dataclass
class Plan:
    """What one request does in one pool."""

    location: dict  # position -> slot
    fetch: dict  # position -> slot, in any order
    retire: dict  # position -> slot
    hits: int = 0
    tails: int = 0
    staged: int = 0
    # What the slots of fetches and of retirements held before, None for an empty one.
    evicted: list = dataclasses.field(default_factory=list)
    retire_evicted: list = dataclasses.field(default_factory=list)


class Residency:
    """What one request holds of one pool."""

    def __init__(self):
        self.pages = []
        self.slot_of = {}  # position -> slot
        self.mark = {}  # slot -> step of last use

    def owned_slots(self, page_slots):
        return [page * page_slots + i for page in self.pages for i in range(page_slots)]

    def forget(self, slot):
        self.slot_of = {p: s for p, s in self.slot_of.items() if s != slot}
        self.mark.pop(slot, None)

    def content(self, slot):
        """Position in a slot, None if it is empty."""
        return next((p for p, s in self.slot_of.items() if s == slot), None)

    def hold(self, position, slot, step):
        self.slot_of[position], self.mark[slot] = slot, step


def plan_request(held, *, page_slots, selection, tail_slot, retiring, staging, step):
    """The contract of `plan` for one request; updates `held`.

    Args:
        held: its Residency.
        page_slots: slots per page.
        selection: a list of positions per query, without padding.
        tail_slot: function of a position: its tail slot, or None where the tail does not hold it.
        retiring: positions that leave the tail, in order.
        staging: the request's staging slots.
        step: number of the step.
    """
    wanted = dict.fromkeys(position for query in selection for position in query)
    plan = Plan(location={}, fetch={}, retire={})
    misses = []
    for position in wanted:
        if position in held.slot_of:
            plan.location[position] = held.slot_of[position]
            held.mark[held.slot_of[position]] = step
            plan.hits += 1
        elif tail_slot(position) is not None:
            plan.location[position] = tail_slot(position)
            plan.tails += 1
        else:
            misses.append(position)
    owned = held.owned_slots(page_slots)
    empty = [slot for slot in owned if slot not in held.mark]
    # A stable sort: equal marks stay in the order of the page list.
    stale = sorted((s for s in owned if held.mark.get(s, step) < step), key=held.mark.__getitem__)
    retiring = [position for position in retiring if position not in held.slot_of]
    victims = set((empty + stale)[: len(misses) + len(retiring)])
    places = [slot for slot in owned if slot in victims]
    for position in misses:
        if places:
            slot = places.pop(0)
            plan.evicted.append(held.content(slot))
            held.forget(slot)
            held.hold(position, slot, step)
        else:
            slot = staging[plan.staged]
            plan.staged += 1
        plan.location[position] = plan.fetch[position] = slot
    for position in retiring:
        if places:
            slot = places.pop(0)
            plan.retire_evicted.append(held.content(slot))
            held.forget(slot)
            held.hold(position, slot, step)
            plan.retire[position] = slot
    return plan


class Model:
    """The whole hierarchy, in the state after the calls made so far."""

    def __init__(self, cfg):
        self.sizes = s = Sizes(cfg)
        rows = s.host_pages * s.host_page
        self.host = [np.zeros((rows, words), np.int32) for words in s.words]
        self.host_pages = [[] for _ in range(s.requests)]
        self.slots = [
            np.zeros((s.slots(hot), s.words[members[0]]), np.int32)
            for hot, members in enumerate(s.hot)
        ]
        self.held = defaultdict(Residency)  # (pool, request)
        self.length = [0] * s.requests
        self.active = [False] * s.requests
        self.step = 1
        self.control = Controller(s)

    def host_row(self, request, position):
        """Pages of the host pools hold consecutive positions."""
        page, place = divmod(position, self.sizes.host_page)
        return self.host_pages[request][page] * self.sizes.host_page + place

    # Pages

    def budgets(self):
        """Held pages by pool and request."""
        s = self.sizes
        return [
            [len(self.held[pool, request].pages) for request in range(s.requests)]
            for pool in range(len(s.words))
        ]

    def set_budgets(self, target):
        """Release the pages worth least, then grant free ones, lowest id first.

        The page lists of those who release any are ordered by worth.
        """
        s = self.sizes
        self.control.rescale(self.budgets(), target)
        for hot, members in enumerate(s.hot):
            turns = [(pool, request) for pool in members for request in range(s.requests)]
            for pool, request in turns:
                held = self.held[pool, request]
                if len(held.pages) > target[pool][request]:
                    held.pages.sort(key=lambda page, held=held: -self._worth(held, page))
                while len(self.held[pool, request].pages) > target[pool][request]:
                    self._release_page(pool, request)
            used = {page for turn in turns for page in self.held[turn].pages}
            free = [page for page in range(s.pages(hot)) if page not in used]
            for pool, request in turns:
                while len(self.held[pool, request].pages) < target[pool][request]:
                    self.held[pool, request].pages.append(free.pop(0))

    def _worth(self, held, page):
        """Uses per step that a page can expect, in 1 / 65,536: a record's is 1 / its age."""
        slots = range(page * self.sizes.page, (page + 1) * self.sizes.page)
        return sum(65536 // max(self.step - held.mark[s], 1) for s in slots if s in held.mark)

    def _release_page(self, pool, request):
        held = self.held[pool, request]
        page = held.pages.pop()
        for slot in range(page * self.sizes.page, (page + 1) * self.sizes.page):
            held.forget(slot)

    # Requests

    def join(self, request, length, host_pages, budgets=None):
        """A request joins; `budgets` are those that an adaptive policy chose."""
        before = np.array(self.budgets())
        expected = (self.control.miss_rate * before).sum(axis=1) / max(sum(self.active), 1)
        self.length[request], self.active[request] = length, True
        self.host_pages[request] = host_pages
        self.control.forget(request)
        if budgets is None:
            budgets = self.budgets()
            for row in budgets:
                row[request] = self.sizes.share
        self.set_budgets(budgets)
        # A newcomer is expected to miss as the others do, who would miss so much with one page.
        self.control.miss_rate[:, request] = expected / np.array(budgets)[:, request]

    def admit(self, pool, request, records, start=0):
        """A prompt goes to the host, its newest records to the tail, those before to hot slots.

        The host has the positions before `start` already.
        """
        s, length = self.sizes, self.length[request]
        held, slots = self.held[pool, request], self.slots[s.hot_of(pool)]
        for position in range(start, length):
            self.host[pool][self.host_row(request, position)] = records[position]
        for position in range(max(0, length - s.tail), length):
            slots[s.tail_slot(pool, request, position)] = records[position]
        owned = held.owned_slots(s.page)
        before_tail = list(range(self.tail_start(request)))[-len(owned) :] if owned else []
        for position, slot in zip(before_tail, owned, strict=False):
            slots[slot] = records[position]
            # As if one position had been used per step, the newest in the step before.
            held.hold(position, slot, self.step - (self.tail_start(request) - position))

    def leave(self, request):
        self.length[request], self.active[request] = 0, False
        self.host_pages[request] = []
        self.control.forget(request)
        budgets = self.budgets()
        for row in budgets:
            row[request] = 0
        self.set_budgets(budgets)

    # A step

    def tail_start(self, request):
        """First position that the tail still holds when the T queries are written."""
        return max(0, self.length[request] + self.sizes.queries - self.sizes.tail)

    def plan(self, pool, request, selection):
        """Plan and retrieve one pool for one active request."""
        s, start = self.sizes, self.tail_start(request)
        first = self.length[request] + s.queries - s.tail
        ring = lambda position: s.tail_slot(pool, request, position)
        plan = plan_request(
            self.held[pool, request],
            page_slots=s.page,
            selection=selection,
            tail_slot=lambda position: ring(position) if position >= start else None,
            retiring=[position for position in range(first, first + s.queries) if position >= 0],
            staging=[s.staging_slot(pool, request, number) for number in range(s.staging)],
            step=self.step,
        )
        evicted = plan.evicted[: s.ghosts] + plan.retire_evicted
        evicted = [position for position in evicted if position is not None]
        self.control.remember(pool, request, evicted, self.held[pool, request].slot_of)
        slots = self.slots[s.hot_of(pool)]
        for position, slot in plan.retire.items():
            slots[slot] = slots[ring(position)]
        for position, slot in plan.fetch.items():
            slots[slot] = self.host[pool][self.host_row(request, position)]
        return plan

    def append(self, pool, request, query, layer, words):
        """Write one new row into the tail."""
        s = self.sizes
        slot = s.tail_slot(pool, request, self.length[request] + query)
        first = layer * s.row_words
        self.slots[s.hot_of(pool)][slot, first : first + s.row_words] = words

    def commit(self, accepted):
        """Accepted positions become history, in the host pools too; the step ends."""
        s = self.sizes
        for request in range(s.requests):
            if not self.active[request]:
                continue
            for position in range(self.length[request], self.length[request] + accepted[request]):
                for pool in range(len(s.words)):
                    record = self.slots[s.hot_of(pool)][s.tail_slot(pool, request, position)]
                    self.host[pool][self.host_row(request, position)] = record
            self.length[request] += accepted[request]
        self.step += 1

    # Adaptive budgets

    def useful(self, request):
        """Pages that the history of a request can fill, or its floor."""
        s = self.sizes
        used = min(self.length[request] + s.queries, s.capacity)
        return max(ceil_div(used, s.page), s.floor)

    def admission(self, request, length):
        """Budgets after an adaptive admission, to a page: see `check_admission`.

        The newcomer gets its even share, or what is free beyond the low watermark if that is more,
        as far as its history can use it. The others shrink, whoever values a page least first.
        """
        s, target = self.sizes, self.budgets()
        value = self.control.value(np.array(target))
        others = [row for row in range(s.requests) if self.active[row]]
        low = 0 if len(others) + 1 == s.requests else 1
        for hot, members in enumerate(s.hot):
            total = s.pages(hot)
            even = total // ((len(others) + 1) * len(members))
            held = {(pool, row): target[pool][row] for pool in members for row in others}
            spare = (total - low * (total // LOW) - sum(held.values())) // len(members)
            history = max(ceil_div(min(length + s.queries, s.capacity), s.page), s.floor)
            wish = max(min(max(even, spare), history), s.floor)
            limit = total - wish * len(members)
            for (pool, row), pages in shrunk(held, value, s.floor, limit).items():
                target[pool][row] = pages
            for pool in members:
                target[pool][request] = wish
        return target
