"""Where positions lie in the host pools, without the library's own arithmetic."""

import numpy as np


def host_rows(cfg, state):
    """Host row of every position of every request, of a state in NumPy; -1 without a page."""
    position = np.arange(cfg.capacity)
    page = state.host_page_of[:, position // cfg.host_page]
    return np.where(page >= 0, page * cfg.host_page + position % cfg.host_page, -1)
