"""An independent model of adaptive residency: plain loops in float64, one page at a time.

Written from the contracts in the docstrings; it imports nothing of the library.
"""

import math
from collections import defaultdict

import numpy as np

DECAY, PRIOR, HYSTERESIS = 0.95, 8.0, 1.5
LOW, HIGH = 256, 128


class Controller:
    """What is known of every pool and request, and what follows from it."""

    def __init__(self, sizes):
        self.sizes = sizes
        shape = (len(sizes.words), sizes.requests)
        self.miss_rate, self.tried, self.saved = (np.zeros(shape) for _ in range(3))
        self.looked, self.refetched = (np.zeros(shape, int) for _ in range(2))
        self.ghosts = defaultdict(list)  # (pool, request) -> positions, newest first

    def forget(self, request):
        for array in (self.miss_rate, self.tried, self.saved, self.looked, self.refetched):
            array[:, request] = 0
        for pool in range(len(self.miss_rate)):
            self.ghosts[pool, request] = []

    def remember(self, pool, request, evicted, hot):
        """`evicted`: by the plan, newest first; `hot`: positions with a slot after it."""
        ghosts = self.ghosts[pool, request]
        stay = [position for position in ghosts if position not in hot]
        self.looked[pool, request] = len(ghosts)
        self.refetched[pool, request] = len(ghosts) - len(stay)
        self.ghosts[pool, request] = (evicted + stay)[: self.sizes.ghosts]

    def learn(self, selected, fetched, active):
        """One step has ended in which so many records were selected and fetched.

        It says nothing of who has selected nothing.
        """
        for pool, row in np.argwhere(selected > 0):
            rate = DECAY * self.miss_rate[pool, row] + (1 - DECAY) * fetched[pool, row]
            self.miss_rate[pool, row] = rate
            if self.sizes.adaptive:
                seen = self.looked[pool, row] / self.sizes.page
                self.tried[pool, row] = DECAY * self.tried[pool, row] + seen
                back = self.refetched[pool, row]
                self.saved[pool, row] = DECAY * self.saved[pool, row] + back
        self.miss_rate = np.where(active, self.miss_rate, 0.0)

    def rescale(self, before, after):
        before, after = np.array(before), np.array(after)
        self.miss_rate = self.miss_rate * before / np.maximum(after, 1)
        self.saved = self.saved * before * (before + 1) / np.maximum(after * (after + 1), 1)

    def value(self, held):
        """Fetches per step that one page more saves, by pool and request."""
        prior = (self.miss_rate + (1 - DECAY)) / (np.array(held) + 1)
        return (self.saved + PRIOR * prior) / (self.tried + PRIOR)

    def fillable(self, model, pool, row):
        """Pages for what is held, and for what comes in the next step."""
        coming = max(math.ceil(self.miss_rate[pool, row]), self.sizes.queries)
        return -(-(len(model.held[pool, row].slot_of) + coming) // self.sizes.page)

    def adapted(self, model):
        """Budgets of the next step, and how near the nearest decision was (0: not at all)."""
        target, margins = np.array(model.budgets()), []
        for hot, pools in enumerate(self.sizes.hot):
            members = [(pool, row) for pool in pools for row in range(self.sizes.requests)]
            value = self.value(target)
            useful = {
                (pool, row): min(model.useful(row), self.fillable(model, pool, row))
                for pool, row in members
            }
            move = Moves(
                held={each: int(target[each]) for each in members},
                value={each: float(value[each]) for each in members},
                useful=useful,
                floor=self.sizes.floor,
                active={(pool, row): model.active[row] for pool, row in members},
                misses={each: self.miss_rate[each] > 1.5 * (1 - DECAY) for each in members},
            )
            total, room = self.sizes.pages(hot), not all(model.active)
            marks = (total // LOW, total // HIGH) if room else (0, 0)
            for each, pages in move.run(self.sizes.moves_per_step, total, *marks).items():
                target[each] = pages
            margins.append(move.margin)
            margins += [abs(rate - round(rate)) for rate in self.miss_rate.flat if rate > 0.5]
        return target.tolist(), min(margins)


class Moves:
    """Pages of one hot pool that change hands, one at a time."""

    def __init__(self, *, held, value, useful, floor, active, misses):
        self.held, self.value, self.useful = dict(held), value, useful
        self.floor, self.active, self.misses = floor, active, misses
        self.start, self.margin = dict(held), np.inf

    def run(self, moves, total, low, high):
        for _ in range(moves):
            if not self.move(total - sum(self.held.values()), low, high):
                break
        return self.held

    def gain(self, who):
        """Fetches that a page more saves, if the misses with n pages are c / n."""
        start, held = self.start[who], self.held[who]
        return self.value[who] * start * (start + 1) / max(held * (held + 1), 1)

    def loss(self, who):
        """Fetches that a page less costs, likewise."""
        start, held = self.start[who], self.held[who]
        return self.value[who] * start * (start + 1) / max(held * (held - 1), 1)

    def pick(self, candidates, worth, sign):
        """The one with the most (+1) or the least (-1), the first of equals."""
        best = max(candidates, key=lambda who: sign * worth(who), default=None)
        alike = lambda who: (self.value[who], self.start[who], self.held[who])
        for other in candidates:
            if alike(other) != alike(best):  # else the values are equal in any precision
                self.near(worth(other), worth(best))
        return best

    def near(self, one, other):
        """Decisions between values that differ by rounding only cannot be told in float32."""
        self.margin = min(self.margin, abs(one - other) / max(abs(one), abs(other)))

    def move(self, free, low, high):
        takers = [w for w in self.held if self.active[w] and self.held[w] < self.useful[w]]
        if free <= high:  # a page that somebody has goes only to who misses records
            takers = [w for w in takers if self.misses[w]]
        givers = [w for w in self.held if self.active[w] and self.held[w] > self.floor]
        taker, giver = self.pick(takers, self.gain, 1), self.pick(givers, self.loss, -1)
        if free < low and giver is not None:
            self.held[giver] -= 1
        elif free > high:
            if taker is None:
                return False
            self.held[taker] += 1
        elif taker is not None and giver is not None:
            asked = HYSTERESIS * self.loss(giver)
            self.near(asked, self.gain(taker))
            if asked >= self.gain(taker):
                return False
            self.held[taker] += 1
            self.held[giver] -= 1
        else:
            return False
        return True


def shrunk(held, value, floor, limit):
    """Budgets after releasing one page at a time from whoever values it least, down to `limit`."""
    now = dict(held)
    worth = lambda who: value[who] * (held[who] / now[who]) ** 2
    while sum(now.values()) > limit:
        now[min((w for w in now if now[w] > floor), key=worth)] -= 1
    return now
