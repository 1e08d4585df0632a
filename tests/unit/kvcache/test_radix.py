"""The radix cache against a model that knows every cached prefix by heart."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ouro_sgl.errors import IntegrityError
from ouro_sgl.kvcache.radix import Columns, Node, RadixCache

LOOPS = 2


def columns_for(count: int, first: int) -> Columns:
    return [list(range(first + d * count, first + (d + 1) * count)) for d in range(LOOPS)]


def add(tree: RadixCache, tokens: list[int], first: int, key: str | None = None) -> Node:
    node, found = tree.match(tokens, len(tokens), key)
    return tree.extend(node, tokens[found:], [c[found:] for c in columns_for(len(tokens), first)], key)


def test_match_returns_the_columns_of_the_prefix_and_respects_the_limit() -> None:
    tree = RadixCache(LOOPS)
    add(tree, [1, 2, 3, 4], 100)
    node, length = tree.match([1, 2, 3, 9], 4, None)
    assert length == 3
    assert tree.columns(node) == [[100, 101, 102], [104, 105, 106]]
    node, length = tree.match([1, 2, 3, 4], 2, None)
    assert (length, tree.columns(node)) == (2, [[100, 101], [104, 105]])
    assert tree.match([1, 2], 0, None) == (None, 0)
    assert tree.match([7], 1, None) == (None, 0)
    assert tree.columns(None) == [[], []]


def test_namespaces_do_not_see_each_other() -> None:
    tree = RadixCache(LOOPS)
    add(tree, [1, 2], 0, "a")
    assert tree.match([1, 2], 2, None) == (None, 0)
    assert tree.match([1, 2], 2, "b") == (None, 0)
    assert tree.match([1, 2], 2, "a")[1] == 2
    tree.evict(1)
    assert tree.match([1, 2], 2, "a") == (None, 0)


def test_splitting_a_locked_node_keeps_its_locks() -> None:
    tree = RadixCache(LOOPS)
    node = add(tree, [1, 2, 3], 0)
    tree.lock(node)
    tree.lock(node)
    upper, _ = tree.match([1, 2, 9], 3, None)
    assert upper is not None
    assert upper is not node
    assert (upper.locks, node.locks, tree.evictable) == (2, 2, 0)
    tree.lock(upper)
    tree.unlock(node)
    tree.unlock(node)
    assert (upper.locks, node.locks, tree.evictable) == (1, 0, node.size)
    with pytest.raises(IntegrityError):
        tree.evict(node.size + 1)
    tree.unlock(upper)
    assert tree.evictable == tree.cached == upper.size  # the lower part was evicted above


def test_evicts_the_least_recently_used_leaf_first() -> None:
    tree = RadixCache(LOOPS)
    first = add(tree, [1, 1], 0)
    second = add(tree, [2, 2], 10)
    tree.lock(first)
    tree.unlock(first)
    assert sorted(tree.evict(1)) == [10, 11, 12, 13]
    assert sorted(tree.evict(1)) == [0, 1, 2, 3]
    assert second.children == {}
    with pytest.raises(IntegrityError):
        tree.evict(1)


def test_a_parent_is_evicted_after_its_children() -> None:
    tree = RadixCache(LOOPS)
    add(tree, [1, 2], 0)
    add(tree, [1, 2, 3], 10)
    assert len(tree.evict(1)) == LOOPS
    assert tree.match([1, 2, 3], 3, None)[1] == 2
    assert len(tree.evict(1)) == 2 * LOOPS
    assert tree.cached == tree.evictable == 0


def test_aliased_columns_are_owned_once() -> None:
    tree = RadixCache(LOOPS)
    node = tree.extend(None, [5, 6], [[1, 2], [1, 3]], None)
    assert (node.size, tree.cached) == (3, 3)
    upper, _ = tree.match([5], 1, None)
    assert upper is not None
    assert (upper.size, node.size) == (1, 2)
    assert sorted(tree.evict(3)) == [1, 2, 3]


def test_a_held_cache_cannot_be_cleared() -> None:
    tree = RadixCache(LOOPS)
    node = add(tree, [1, 2], 0)
    tree.lock(node)
    with pytest.raises(IntegrityError):
        tree.clear()
    tree.unlock(node)
    assert sorted(tree.clear()) == [0, 1, 2, 3]
    assert (tree.cached, tree.evictable, tree.match([1], 1, None)) == (0, 0, (None, 0))
    with pytest.raises(IntegrityError):
        tree.unlock(node)


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_random_use_agrees_with_a_plain_model(seed: int) -> None:
    rng = random.Random(seed)
    tree = RadixCache(LOOPS)
    owner: dict[tuple[object, ...], tuple[int, ...]] = {}  # prefix: slots of its last token
    held: list[tuple[Node, str | None, list[int]]] = []
    next_slot = 0
    for _ in range(80):
        key = rng.choice([None, "k"])
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        known = 0
        while known < len(tokens) and (key, *tokens[: known + 1]) in owner:
            known += 1
        action = rng.random()
        if action < 0.4:
            limit = rng.randrange(len(tokens) + 1)
            node, length = tree.match(tokens, limit, key)
            assert length == min(known, limit)
            expected = [owner[(key, *tokens[: i + 1])] for i in range(length)]
            assert list(zip(*tree.columns(node), strict=True)) == expected
            if node is not None and rng.random() < 0.5:
                before = tree.evictable
                cost = tree.lock_cost(node)
                tree.lock(node)
                assert tree.evictable == before - cost
                held.append((node, key, tokens[:length]))
        elif action < 0.7:
            node, length = tree.match(tokens, len(tokens), key)
            assert length == known
            if length < len(tokens):
                columns = columns_for(len(tokens) - length, next_slot)
                next_slot += LOOPS * (len(tokens) - length)
                tree.extend(node, tokens[length:], columns, key)
                for i in range(length, len(tokens)):
                    owner[(key, *tokens[: i + 1])] = tuple(c[i - length] for c in columns)
        elif action < 0.85 and held:
            tree.unlock(held.pop(rng.randrange(len(held)))[0])
        elif tree.evictable:
            wanted = rng.randrange(1, tree.evictable + 1)
            gone = set(tree.evict(wanted))
            assert len(gone) >= wanted
            lost = [prefix for prefix, slots in owner.items() if set(slots) & gone]
            assert sum(len(owner.pop(prefix)) for prefix in lost) == len(gone)
        assert tree.cached == LOOPS * len(owner)
        locked = {(k, *path[: i + 1]) for _, k, path in held for i in range(len(path))}
        assert locked <= owner.keys()
        assert tree.evictable == LOOPS * len(owner.keys() - locked)
