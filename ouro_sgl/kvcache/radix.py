"""The radix cache: a tree of token prefixes whose nodes own slots.

A node covers a run of tokens and holds T slot columns, ``columns[d][i]`` being the slot of depth
``d`` of its ``i``-th token. Columns of a generated token may alias (deeper depths that it did not
run), so a node owns the SET of its slots.

Locks go by path: a row that holds a node locks it and all of its ancestors. A node is *evictable*
while it has no lock; an unlocked node never has a locked descendant, so every evictable slot can
be had by removing unlocked leaves, least recently used first.

The tree only keeps books: it neither takes slots from the allocator nor gives them back.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence

from ouro_sgl.errors import IntegrityError

Columns = list[list[int]]


class Node:
    """One run of tokens below ``parent``. The root of a namespace has no parent and no tokens."""

    def __init__(
        self, parent: Node | None, key: list[int], columns: Columns, serial: int, namespace: Hashable
    ) -> None:
        self.parent = parent
        self.key = key
        self.columns = columns
        self.children: dict[int, Node] = {}  # by first token
        self.namespace = namespace
        self.locks = 0  # rows that hold this node or a descendant
        self.used = 0  # the tree's clock at the last lock or unlock
        self.serial = serial  # breaks ties of the clock, so that eviction is deterministic
        self.queued = False  # stands in the eviction queue
        self.size = len(set().union(*columns)) if columns else 0  # distinct slots


class RadixCache:
    """Prefix tree over ``total_loops`` slot columns, with one name space per ``extra_key``."""

    def __init__(self, total_loops: int) -> None:
        self.total_loops = total_loops
        self.version = 0  # changes whenever an earlier match may have become wrong or too short
        self.evictable = 0  # distinct slots of unlocked nodes
        self.cached = 0  # distinct slots of all nodes
        self._roots: dict[Hashable, Node] = {}
        self._queue: list[tuple[int, int, Node]] = []  # (used, serial, leaf); entries may be stale
        self._clock = 0
        self._serial = 0

    # ------------------------------------------------------------------ reading

    def match(self, tokens: Sequence[int], limit: int, extra_key: Hashable) -> tuple[Node | None, int]:
        """The longest cached prefix of ``tokens[:limit]``.

        Splits a node that matches in part, so that the returned node ends where the match ends.

        Returns:
            The deepest node (None if nothing matches) and the number of tokens matched.
        """
        node = self._roots.get(extra_key)
        at = 0
        while node is not None and at < limit:
            child = node.children.get(tokens[at])
            if child is None:
                break
            common = _common_length(child.key, tokens, at, limit)
            at += common
            if common < len(child.key):
                node = self._split(child, common)
                break
            node = child
        return (node if at else None), at

    def columns(self, node: Node | None) -> Columns:
        """The T slot columns of the whole prefix that ends with ``node``."""
        path = list(_path(node))
        path.reverse()
        return [[slot for part in path for slot in part.columns[d]] for d in range(self.total_loops)]

    def lock_cost(self, node: Node | None) -> int:
        """Slots that would stop being evictable if ``node`` were locked now."""
        cost = 0
        for part in _path(node):
            if part.locks:
                break
            cost += part.size
        return cost

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, for integrity checks."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    # ------------------------------------------------------------------ changing

    def extend(self, node: Node | None, tokens: list[int], columns: Columns, extra_key: Hashable) -> Node:
        """Add ``tokens`` below ``node`` (None: at the root), unlocked; the tree now owns the slots.

        ``node`` and the number of tokens that it ends after must come from a :meth:`match` of the
        whole sequence, so that no child begins with the first of ``tokens``.
        """
        if node is None:
            node = self._roots.get(extra_key)
        if node is None:
            node = self._roots[extra_key] = self._make(None, [], [], extra_key)
        if tokens[0] in node.children:
            raise IntegrityError("a radix node would hide another one")
        child = self._make(node, tokens, columns, extra_key)
        node.children[tokens[0]] = child
        self._clock += 1
        child.used = self._clock
        self.cached += child.size
        self.evictable += child.size
        self.version += 1
        self._enqueue(child)
        return child

    def lock(self, node: Node | None) -> None:
        """Keep ``node`` and its ancestors from eviction, once more."""
        self._clock += 1
        for part in _path(node):
            if part.locks == 0:
                self.evictable -= part.size
            part.locks += 1
            part.used = self._clock

    def unlock(self, node: Node | None) -> None:
        """Undo one :meth:`lock` of ``node``."""
        self._clock += 1
        for part in _path(node):
            if part.locks == 0:
                raise IntegrityError("a radix node was unlocked more often than locked")
            part.locks -= 1
            part.used = self._clock
            if part.locks == 0:
                self.evictable += part.size
                self._enqueue(part)

    def evict(self, count: int) -> list[int]:
        """Remove unlocked leaves, least recently used first, until at least ``count`` slots came free.

        Raises:
            IntegrityError: so many slots are not evictable.
        """
        freed: list[int] = []
        while len(freed) < count:
            if not self._queue:
                raise IntegrityError(f"{count} slots are to be evicted, {len(freed)} can be")
            used, _, leaf = heapq.heappop(self._queue)
            leaf.queued = False
            if used != leaf.used:
                self._enqueue(leaf)  # used since: it comes again at its new place, if still a free leaf
            elif leaf.locks == 0 and not leaf.children:
                freed.extend(self._remove(leaf))
        return freed

    def clear(self) -> list[int]:
        """Drop everything; returns the slots.

        Raises:
            IntegrityError: a row still holds a node.
        """
        slots: list[int] = []
        for node in self.nodes():
            if node.locks:
                raise IntegrityError("the radix cache cannot be emptied while rows hold nodes")
            slots.extend(dict.fromkeys(slot for column in node.columns for slot in column))
        self._roots.clear()
        self._queue.clear()
        self.evictable = self.cached = 0
        self.version += 1
        return slots

    # ------------------------------------------------------------------ inside

    def _make(self, parent: Node | None, key: list[int], columns: Columns, namespace: Hashable) -> Node:
        self._serial += 1
        return Node(parent, key, columns, self._serial, namespace)

    def _split(self, node: Node, at: int) -> Node:
        """Cut ``node`` after ``at`` tokens. The lower part stays the same object: rows hold it.

        Whoever holds the lower part holds the upper one through it, hence the same lock count.
        """
        upper = self._make(node.parent, node.key[:at], [c[:at] for c in node.columns], node.namespace)
        upper.locks, upper.used = node.locks, node.used
        assert node.parent is not None
        node.parent.children[node.key[0]] = upper
        node.key = node.key[at:]
        node.columns = [c[at:] for c in node.columns]
        node.size -= upper.size  # tokens never share slots
        node.parent = upper
        upper.children[node.key[0]] = node
        return upper

    def _enqueue(self, node: Node) -> None:
        if node.locks == 0 and not node.children and not node.queued:
            node.queued = True
            heapq.heappush(self._queue, (node.used, node.serial, node))

    def _remove(self, leaf: Node) -> list[int]:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key[0]]
        self.evictable -= leaf.size
        self.cached -= leaf.size
        self.version += 1
        if parent.parent is not None:
            self._enqueue(parent)
        elif not parent.children:
            del self._roots[parent.namespace]
        return list(dict.fromkeys(slot for column in leaf.columns for slot in column))


def _path(node: Node | None) -> Iterator[Node]:
    """``node`` and its ancestors, without the root."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent


def _common_length(key: list[int], tokens: Sequence[int], at: int, limit: int) -> int:
    """How many tokens of ``key`` agree with ``tokens[at:limit]``; the first one is known to."""
    size = min(len(key), limit - at)
    if key[:size] == tokens[at : at + size]:
        return size
    return next(i for i in range(size) if key[i] != tokens[at + i])
