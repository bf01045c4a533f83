from __future__ import annotations

import pytest

from twostroke.core.errors import ConfigError
from twostroke.scheduling.pages import PagePool
from twostroke.scheduling.prefix_tree import ROOT, PrefixTree, chain_key


def test_pages_of_one_request_are_neighbours_in_a_fresh_pool() -> None:
    pool = PagePool(8)
    first = pool.allocate(3)
    assert first == [0, 1, 2]
    assert pool.allocate(1, after=2) == [3]


def test_taking_more_than_is_free_takes_nothing() -> None:
    pool = PagePool(4)
    pool.allocate(3)
    assert pool.allocate(2) is None
    assert pool.n_free == 1


def test_a_page_is_free_only_after_its_last_reference_is_released() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    assert pages is not None
    pool.retain(pages)
    pool.release(pages)
    assert pool.n_used == 1
    pool.release(pages)
    assert pool.n_used == 0


def test_releasing_twice_is_an_error_and_not_a_second_free_page() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    assert pages is not None
    pool.release(pages)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(pages)
    assert pool.n_free == 2


def test_cached_pages_are_evicted_last_and_the_least_recently_freed_first() -> None:
    pool = PagePool(4)
    pages = pool.allocate(4)
    assert pages == [0, 1, 2, 3]
    pool.tree.insert(chain_key(ROOT, [1]), [1], 0, ROOT)
    pool.tree.insert(chain_key(ROOT, [2]), [2], 1, ROOT)
    pool.release([1])
    pool.release([0])
    pool.release([2, 3])
    assert pool.n_cached == 2
    assert pool.allocate(2) == [2, 3]  # blank ones first
    assert pool.allocate(1) == [1]  # freed before page 0
    assert 0 in pool.tree
    assert 1 not in pool.tree


def test_the_end_of_a_prefix_is_evicted_before_its_start() -> None:
    pool = PagePool(3)
    pages = pool.allocate(3)
    assert pages is not None
    key = ROOT
    for page in pages:
        before, key = key, chain_key(key, [page])
        pool.tree.insert(key, [page], page, before)
    pool.release(pages)
    assert pool.allocate(1) == [2]


def test_discarded_content_is_never_found_again() -> None:
    pool = PagePool(2)
    pages = pool.allocate(2)
    assert pages is not None
    key = chain_key(ROOT, [7])
    pool.tree.insert(key, [7], pages[0], ROOT)
    pool.discard_content(pages)
    pool.release(pages)
    assert pool.tree.match([key], [7], 1, 1) == []
    assert pool.n_cached == 0
    assert pool.n_free == 2


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="n_pages=0"):
        PagePool(0)


def test_a_match_needs_the_same_tokens_and_the_same_history() -> None:
    tree = PrefixTree()
    a = chain_key(ROOT, [1, 2])
    b = chain_key(a, [3, 4])
    tree.insert(a, [1, 2], 5, ROOT)
    tree.insert(b, [3, 4], 6, a)
    assert tree.match([a, b], [1, 2, 3, 4], 2, 9) == [5, 6]
    assert tree.match([a, b], [1, 2, 3, 4], 2, 1) == [5]
    assert tree.match([chain_key(ROOT, [3, 4])], [3, 4], 2, 9) == []  # same tokens, other history


def test_a_key_collision_is_caught_by_the_token_ids() -> None:
    tree = PrefixTree()
    key = chain_key(ROOT, [1, 2])
    tree.insert(key, [1, 2], 5, ROOT)
    assert tree.match([key], [9, 9], 2, 1) == []


def test_the_first_holder_of_a_prefix_stays() -> None:
    tree = PrefixTree()
    key = chain_key(ROOT, [1])
    assert tree.insert(key, [1], 5, ROOT)
    assert not tree.insert(key, [1], 6, ROOT)
    assert tree.match([key], [1], 1, 1) == [5]
    tree.remove(6)  # unknown pages are no error: eviction does not ask
    tree.remove(5)
    assert len(tree) == 0


def test_the_page_that_begins_most_alike_is_found_behind_its_prefix_alone() -> None:
    tree = PrefixTree()
    a = chain_key(ROOT, [1, 2, 3])
    tree.insert(a, [1, 2, 3], 0, ROOT)
    for page, tokens in enumerate(([4, 5, 6], [4, 5], [4, 9, 9]), start=1):
        tree.insert(chain_key(a, tokens), tokens, page, a)
    assert tree.begun(a, [4, 5, 6]) == (1, 3)
    assert tree.begun(a, [4, 5, 7])[1] == 2
    assert tree.begun(a, [4, 9]) == (3, 2)
    assert tree.begun(a, [4]) == (3, 1)  # the newest
    assert tree.begun(a, [7]) == tree.begun(a, []) == tree.begun(b"other", [4]) == (-1, 0)
    assert tree.begun(ROOT, [1, 2, 9]) == (0, 2)
    for page in range(4):
        tree.remove(page)
    assert tree.begun(a, [4, 5, 6]) == (-1, 0)
    assert not tree._behind
