"""What an audit finds: counts of what was compared, and where a promise does not hold."""

import dataclasses
from collections import Counter

PROMISES = {
    "E0": "every fetched record equals its host bytes, and the plan covers exactly the selection",
    "E1": "outputs are bit for bit those of resident",
    "E2": "greedy tokens with speculation are those without it",
    "E3": "sampled tokens have the model's distribution",
}
"""What each level promises, by its name."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where something is not what it should be; None for what does not apply.

    Attributes:
        what: what was compared.
        request: name of the request.
        step: decode step, from 1; 0 is the end of the prompt.
        layer: of those that attend over records, from 0.
        position: of the token.
        detail: the numbers.
    """

    what: str
    request: str | None = None
    step: int | None = None
    layer: int | None = None
    position: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        """One line."""
        names = ("request", "step", "layer", "position")
        where = [f"{name} {getattr(self, name)}" for name in names if _known(self, name)]
        return (
            ", ".join(where or ["somewhere"])
            + f": {self.what}"
            + f" ({self.detail})" * bool(self.detail)
        )


def _known(difference: Difference, name: str) -> bool:
    return getattr(difference, name) is not None


class Level:
    """One promise, and what was found about it.

    Args:
        name: one of PROMISES.

    Attributes:
        counts: how much was compared, by name.
        figures: other numbers that were measured, by name.
        differences: how many differences there were.
        first: the first of them.
        untried: why nothing was compared, if so.
    """

    def __init__(self, name: str) -> None:
        self.name, self.promise = name, PROMISES[name]
        self.counts: Counter[str] = Counter()
        self.figures: dict[str, float] = {}
        self.differences = 0
        self.first: Difference | None = None
        self.untried: str | None = None

    @property
    def verdict(self) -> str:
        """proved, as far as was compared; REFUTED; or untried."""
        if self.first is not None:
            return "REFUTED"
        return "proved" if self.counts and self.untried is None else "untried"

    def add(self, found: list[Difference]) -> None:
        """Take in the differences of one step.

        The first step with any has the first of all: the one in its lowest layer, where it arose;
        then of the lowest position.
        """
        self.differences += len(found)
        if self.first is None and found:
            last = 1 << 31  # what has no layer, such as logits, comes after all layers
            order = lambda one: tuple(
                last if place is None else place for place in (one.layer, one.position)
            )
            self.first = min(found, key=order)

    def document(self) -> dict[str, object]:
        """For the JSON document."""
        return {
            "level": self.name,
            "promise": self.promise,
            "verdict": self.verdict,
            "untried": self.untried,
            "counts": dict(self.counts),
            "figures": self.figures,
            "differences": self.differences,
            "first": None if self.first is None else dataclasses.asdict(self.first),
        }
