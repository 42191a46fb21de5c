"""Which prompts were seen before, and how much of one can be taken over: pages of keys, and a snapshot of the state.

Keys in a page are good for any prompt that begins with the same tokens. A recurrent state is good at one depth alone.
So a prefix is usable up to the deepest page border for which a snapshot of exactly that depth exists; pages beyond it
are computed again. Pages form a tree: a node is one page of tokens after its parent's.

    cache = PrefixCache(page_tokens=64, snapshots=4)
    hit = cache.match(prompt)                 # deepest usable node, or None
    cache.hold(hit); ...; cache.release(hit)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Node:
    """One page of a prefix.

    Attributes:
        depth: tokens up to the end of this page.
        snapshot: place of the state after exactly `depth` tokens; None: there is none.
        holders: running sequences whose prefix goes through this page; it is not dropped before there are none.
        used: when it was last part of a prompt, on the cache's own clock.
    """

    parent: Node | None
    tokens: tuple[int, ...]
    depth: int
    page: int
    snapshot: int | None = None
    holders: int = 0
    used: int = 0
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)

    def path(self) -> Iterator[Node]:
        """This node and those before it, deepest first, without the root."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent


class PrefixCache:
    """The tree, and the places for snapshots. Least recently used goes first, of pages and of snapshots alike."""

    def __init__(self, page_tokens: int, snapshots: int) -> None:
        self.page_tokens = page_tokens
        self._root = Node(None, (), 0, -1)
        self._free = list(range(snapshots - 1, -1, -1))
        self._clock = 0

    def match(self, prompt: Sequence[int]) -> Node | None:
        """The deepest node that a prompt can start from: it has a snapshot, and at least one token is left."""
        best, node = None, self._root
        while node.depth + self.page_tokens < len(prompt):
            child = node.children.get(self._page(prompt, node.depth))
            if child is None:
                break
            node = child
            best = node if node.snapshot is not None else best
        return best

    def hold(self, node: Node) -> None:
        """A running sequence starts from `node`."""
        for part in node.path():
            part.holders += 1
            part.used = self._tick()

    def release(self, node: Node) -> None:
        """A sequence that held `node` ended."""
        for part in node.path():
            part.holders -= 1

    def extend(self, node: Node | None, prompt: Sequence[int], depth: int,
               pages: Sequence[int]) -> tuple[Node, list[int]]:
        """Take over a sequence's pages up to `depth`, and hold them for it.

        Args:
            node: what the sequence holds already.
            depth: a multiple of page_tokens.
            pages: of the whole sequence, in order.
        Returns:
            What the sequence holds now; and those of its pages that the cache owns from now on. Where another sequence
            came first with the same tokens, its page stays and this sequence keeps its own.
        """
        at, taken = node or self._root, []
        while at.depth < depth:
            tokens = self._page(prompt, at.depth)
            child = at.children.get(tokens)
            if child is None:
                page = pages[at.depth // self.page_tokens]
                child = at.children[tokens] = Node(at, tokens, at.depth + self.page_tokens, page)
                taken.append(page)
            child.holders += 1
            child.used = self._tick()
            at = child
        return at, taken

    def place_snapshot(self, node: Node) -> int | None:
        """A place for the state at `node`: a free one, or that of the least recently used other node. None: the node
        has a snapshot already, or there is no place at all."""
        if node.snapshot is not None:
            return None
        if self._free:
            node.snapshot = self._free.pop()
            return node.snapshot
        oldest = min((n for n in self._nodes() if n.snapshot is not None), key=lambda n: n.used, default=None)
        if oldest is None:
            return None
        node.snapshot, oldest.snapshot = oldest.snapshot, None
        return node.snapshot

    def evictable(self) -> int:
        """How many pages `evict` could give back: a page that nobody holds has no children that anybody holds."""
        return sum(1 for node in self._nodes() if not node.holders)

    def evict(self, count: int) -> list[int]:
        """Drop least recently used pages that nobody holds, leaves first, and give them back."""
        given: list[int] = []
        while len(given) < count:
            leaf = min((n for n in self._nodes() if not n.holders and not n.children), key=lambda n: n.used)
            assert leaf.parent is not None
            del leaf.parent.children[leaf.tokens]
            if leaf.snapshot is not None:
                self._free.append(leaf.snapshot)
            given.append(leaf.page)
        return given

    def _page(self, prompt: Sequence[int], depth: int) -> tuple[int, ...]:
        return tuple(prompt[depth:depth + self.page_tokens])

    def _nodes(self) -> Iterator[Node]:
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
