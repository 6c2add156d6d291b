"""Host pages and the texts in them, against plain dictionaries."""

import numpy as np
import pytest

from dhisparse_jax.engine.host_pages import HostPages
from dhisparse_jax.engine.prefixes import Prefix, Prefixes
from dhisparse_jax.engine.sharing import Sharing
from dhisparse_jax.errors import UserError
from tests.support.serving import config

BLOCK = 4


def test_a_page_is_free_when_nobody_holds_it():
    rng, pages = np.random.default_rng(0), HostPages(20)
    used, kept = [], []
    for _ in range(400):
        match int(rng.integers(5)):
            case 0:
                used.append(pages.take(int(rng.integers(0, pages.free + 1))))
            case 1 if used:
                used.append(used[int(rng.integers(len(used)))])
                pages.hold(used[-1])
            case 2 if used:
                pages.drop(used.pop(int(rng.integers(len(used)))))
            case 3 if used:
                kept.append(used[int(rng.integers(len(used)))])
                pages.keep(kept[-1])
            case 4 if kept:
                pages.forget(kept.pop(int(rng.integers(len(kept)))))
        count = lambda lists: np.bincount(np.concatenate([[], *lists]).astype(int), minlength=20)
        np.testing.assert_array_equal(pages.users, count(used))
        np.testing.assert_array_equal(pages.keepers, count(kept))
        assert pages.free == (count(used + kept) == 0).sum()
        assert pages.unused == (count(used) == 0).sum()
    for held in used:
        pages.drop(held)
    for held in kept:
        pages.forget(held)
    assert sorted(pages.take(20).tolist()) == list(range(20))


def common(one, other):
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def test_the_longest_prefix_is_found():
    """Two kinds of tokens only, so that texts have much in common."""
    rng, prefixes, texts = np.random.default_rng(1), Prefixes(BLOCK), {}
    found = 0
    for _ in range(500):
        text = (rng.random(rng.integers(0, 30)) < 0.15).astype(int).tolist()
        number = int(rng.integers(6))
        if rng.random() < 0.4:
            prefixes.add(number, text)
            texts[number] = text
        elif rng.random() < 0.3:
            prefixes.remove(number)
            texts.pop(number, None)
        probe = (rng.random(rng.integers(0, 30)) < 0.15).astype(int).tolist()
        best = max((common(mine, probe) for mine in texts.values()), default=0)
        got = prefixes.longest(probe)
        if best < BLOCK:
            assert got == Prefix()
        else:
            assert got.length == best == common(texts[got.text], probe)
            found += 1
    assert found > 100


def test_equal_names_of_different_texts_share_nothing_wrong(monkeypatch):
    """Names only nominate."""
    prefixes = Prefixes(BLOCK)
    monkeypatch.setattr(prefixes, "_names", lambda text: list(range(len(text) // BLOCK)))
    prefixes.add(0, [1, 2, 3, 4, 5, 6, 7, 8])
    assert prefixes.longest([1, 2, 3, 9, 5, 6, 7, 8]) == Prefix()
    assert prefixes.longest([1, 2, 3, 4, 9, 6, 7, 8]) == Prefix(0, 4)
    prefixes.remove(0)
    assert prefixes.longest([1, 2, 3, 4]) == Prefix()


def sharing(host_pages):
    return Sharing(config("fixed", 4, host_page=4, host_pages=host_pages))


def test_pages_of_a_request_by_hand():
    """10 positions take 3 pages; a text of 9 positions stays in them, and 6 of these are shared."""
    own = sharing(host_pages=8)
    first = own.enter(0, (), 10)
    assert first.pages.tolist()[:4] == [0, 1, 2, -1]
    assert (int(first.shared), int(first.kept)) == (0, 0)
    own.has(0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = own.enter(1, [1, 2, 3, 4, 5, 6, 9, 9], 12)
    assert (int(second.shared), int(second.kept)) == (6, 4)
    assert second.source.tolist()[:3] == [0, 1, -1]
    assert second.pages.tolist()[:4] == [0, 3, 4, -1]
    # Until its prompt is prefilled, it copies from page 1.
    assert own.pages.users.tolist() == [2, 2, 1, 1, 1, 0, 0, 0]
    own.has(1, [1, 2, 3, 4, 5, 6, 9, 9])
    assert own.pages.users.tolist() == [2, 1, 1, 1, 1, 0, 0, 0]
    own.leave(0)
    assert own.pages.users.tolist() == [1, 0, 0, 1, 1, 0, 0, 0]
    assert own.pages.free == 3  # pages 1 and 2 hold the first text
    own.leave(1)
    own.forget()
    assert own.pages.free == own.pages.unused == 8


def test_the_last_token_is_never_shared():
    """It has to be read, to know what comes next."""
    own, text = sharing(host_pages=20), list(range(12))
    own.enter(0, (), 12)
    own.has(0, text)
    entry = own.enter(1, text, 12)
    assert (int(entry.shared), int(entry.kept)) == (11, 8)


def test_texts_give_way_to_requests_oldest_first():
    """All of them were in the same row."""
    own, texts = sharing(host_pages=9), [[kind] * 8 for kind in range(3)]
    for text in texts:
        own.enter(0, text, 8)
        own.has(0, text)
        own.leave(0)
    assert own.pages.free == 3
    for positions, known in ((20, [0, 8, 8]), (24, [0, 0, 8]), (28, [0, 0, 8]), (29, [0, 0, 0])):
        own.enter(0, [9] * positions, positions)
        assert [own._plan([*text, 5], 1, own.pages.users).prefix.length for text in texts] == known
        own.leave(0)


def test_what_is_shared_is_not_given_away_for_it():
    """The text that a request continues is the only one, and just what it needs beside is free."""
    own = sharing(host_pages=4)
    own.enter(0, (), 8)
    own.has(0, [1] * 8)
    own.leave(0)
    entry = own.enter(1, [1] * 9, 16)
    assert entry.pages.tolist()[:5] == [0, 1, 2, 3, -1]
    assert int(entry.shared) == 8


def test_a_copy_that_would_not_leave_enough_is_not_made():
    """7 of 8 positions agree: with a page to copy from, 5 pages would be needed."""
    own = sharing(host_pages=4)
    own.enter(0, (), 8)
    own.has(0, [1] * 8)
    own.leave(0)
    assert own.fits([1] * 7 + [2] * 5, 16)
    entry = own.enter(1, [1] * 7 + [2] * 5, 16)
    assert int(entry.shared) == int(entry.kept) == 4
    assert len({*entry.pages.tolist()} - {-1}) == 4


def test_asking_again_looks_again_only_after_a_change(monkeypatch):
    own, long, looked = sharing(host_pages=4), tuple(range(10)), []
    own.enter(0, (), 8)
    plan = own._plan
    monkeypatch.setattr(own, "_plan", lambda *asked: looked.append(asked) or plan(*asked))
    assert [own.fits(long, positions) for positions in (9, 9, 10, 8)] == [False] * 3 + [True]
    assert [positions for _, positions, _ in looked] == [9, 8]
    assert not own.fits(long, 9)
    own.leave(0)
    assert own.fits(long, 9)


def test_too_large_requests_are_refused():
    own = sharing(host_pages=4)
    own.check("it", 16)
    with pytest.raises(UserError, match=r"it: 17 positions need 5 pages of 4 .* has 4; .* most 16"):
        own.check("it", 17)
    own.enter(0, (), 8)
    assert own.fits((), 8)
    assert not own.fits((), 9)
    with pytest.raises(UserError, match="9 positions need 3 pages of 4 in host memory, 2 of 4"):
        own.enter(1, (), 9)
    assert own.pages.users.sum() == 2


def test_a_request_without_a_row_keeps_its_pages():
    """They are counted, can be shared, and come back to another row as they were."""
    own = sharing(host_pages=6)
    before = own.enter(2, (), 12).pages.tolist()
    own.has(2, [1, 2, 3, 4, 5])
    paged = own.take_out(2)
    assert own.pages.unused == 3
    assert not own.fits((), 13)
    assert own.fits((), 13, [paged])
    assert int(own.enter(2, [1, 2, 3, 4, 9], 8).shared) == 4
    assert own.put_back(0, paged).tolist() == before
    own.leave(0)
    own.leave(2)
    own.forget()
    assert own.pages.free == 6


def test_pages_given_up_can_still_be_read():
    """Until somebody needs them: the one who needs them first may share them."""
    own = sharing(host_pages=4)
    own.enter(0, (), 16)
    own.has(0, list(range(10)))
    paged = own.take_out(0)
    assert own.fits(list(range(12)), 16, [paged])
    own.release(paged)
    assert int(own.enter(1, list(range(12)), 16).shared) == 8
