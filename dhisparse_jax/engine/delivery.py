"""What has happened to requests, told in its turn."""

from collections import deque
from collections.abc import Iterator

from dhisparse_jax.engine.events import Event, Finished, NewTokens
from dhisparse_jax.engine.job import Part
from dhisparse_jax.engine.roster import Roster


def deliver(pending: deque[Event | Part], roster: Roster) -> Iterator[Event]:
    """Deliver what is pending; a request leaves its row when its last tokens are out."""
    while pending:
        item = pending.popleft()
        if not isinstance(item, Part):
            yield item
            continue
        if roster.jobs.get(item.job.number) is not item.job:
            continue  # cancelled
        if item.tokens:
            if item.reason is not None:  # in its turn, also if nobody listens any more by then
                pending.appendleft(Part(item.job, (), item.reason))
            yield NewTokens(item.job.number, item.tokens)
        elif item.reason is not None:
            roster.end(item.job)
            yield Finished(item.job.number, item.reason)
