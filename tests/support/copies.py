"""What `retrieve` and `backup` must do, one copy at a time."""


def copied(destination, source, to, from_):
    """Copies, one at a time: -1 skips, what does not exist is all ones, and nowhere is dropped."""
    for target, origin in zip(to.tolist(), from_.tolist(), strict=True):
        if target == -1 or origin == -1 or not 0 <= target < len(destination):
            continue
        destination[target] = source[origin] if 0 <= origin < len(source) else -1
    return destination


def retrieved(inputs):
    """What `retrieve` must return."""
    fetches, result = inputs.fetches, inputs.slots.copy()
    if inputs.moves:
        copied(result, inputs.slots, inputs.moves.targets, inputs.moves.sources)
    for rows, targets, count in zip(*fetches, strict=True):
        copied(result, inputs.host, targets[:count], rows[:count])
    return result


def backed_up(inputs):
    """What `backup` must return."""
    each = zip(inputs.hosts, inputs.slots_of, inputs.sources, strict=True)
    return [
        copied(host.copy(), inputs.slots[array], inputs.rows, sources)
        for host, array, sources in each
    ]
