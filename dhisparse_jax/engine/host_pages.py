"""Host pages and who has them: plain bookkeeping between steps, no device work.

A request gets all the pages that it can ever need when it enters, so no step waits for one, and
none runs out of them.
"""

import numpy as np
from jaxtyping import Int

Pages = Int[np.ndarray, " _"]
"""Distinct pages in the order of the positions in them."""


class HostPages:
    """Counts the holders of every page; a page without one is free.

    Args:
        count: pages that there are.

    Attributes:
        users: requests that read or write each page.
        keepers: finished texts that still lie in each page; they give way to requests.
    """

    def __init__(self, count: int) -> None:
        self.users = np.zeros(count, np.int32)
        self.keepers = np.zeros(count, np.int32)
        self._free = np.arange(count, dtype=np.int32)

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def unused(self) -> int:
        """Pages that no request holds: free ones, and those of finished texts."""
        return int((self.users == 0).sum())

    def take(self, count: int) -> Pages:
        """Hand out free pages, of which there must be so many, to one user."""
        taken, self._free = self._free[:count], self._free[count:]
        self.users[taken] = 1
        return taken

    def hold(self, pages: Pages) -> None:
        """One user more."""
        self.users[pages] += 1

    def drop(self, pages: Pages) -> None:
        """One user less."""
        self.users[pages] -= 1
        self._reclaim(pages)

    def keep(self, pages: Pages) -> None:
        """One keeper more."""
        self.keepers[pages] += 1

    def forget(self, pages: Pages) -> None:
        """One keeper less."""
        self.keepers[pages] -= 1
        self._reclaim(pages)

    def _reclaim(self, pages: Pages) -> None:
        """Those of the pages that nobody holds any more are free."""
        idle = pages[(self.users[pages] == 0) & (self.keepers[pages] == 0)]
        self._free = np.concatenate([self._free, idle])
