"""Drive a core's graphs by hand, one sequence at a time, to look at the logits that the engine never hands out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime import LoadedCore

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Lane:
    """One sequence in slot `slot` of a core, alone in its launches. Pages are handed out in reverse order, so that no
    position lies where its number says."""

    core: LoadedCore
    limit: int
    slot: int = 0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget every token."""
        io = self.core.io
        pages = io["page_table"].shape[1]
        io["page_table"][self.slot] = np.arange(pages)[::-1] + self.slot * pages
        io["limit"][self.slot] = self.limit
        io["length"][self.slot] = 0
        io["temperature"][self.slot] = 0

    def launch(self, role: str) -> None:
        self.core.io["slots"][:] = -1
        self.core.io["slots"][0] = self.slot
        self.core.graph(role, 1).run()

    def prefill(self, tokens: Sequence[int], chunks: Sequence[int] | None = None) -> Logits:
        """Prefill in chunks of these sizes (None: as large as may be); the logits of the last token, [vocab]."""
        io, size = self.core.io, len(self.core.io["chunk_tokens"])
        left = list(tokens)
        for count in chunks or [min(size, len(left) - i) for i in range(0, len(left), size)]:
            io["chunk_tokens"][:count] = left[:count]
            io["chunk_tokens"][count:] = 0
            io["chunk_count"][0] = count
            self.launch("prefill")
            del left[:count]
        assert not left
        return io["logits"][0].copy()

    def decode(self, token: int) -> Logits:
        """Append `token`; the logits of its position, [vocab]."""
        self.core.io["anchor"][self.slot] = token
        self.launch("decode")
        return self.core.io["logits"][0].copy()

    def verify(self, anchor: int, proposals: Sequence[int]) -> Logits:
        """Verify a block; the logits of its rows, [1 + depth, vocab]. What is accepted is appended."""
        io = self.core.io
        io["anchor"][self.slot] = anchor
        io["proposals"][0] = proposals
        self.launch("verify")
        return io["logits"][:1 + len(proposals)].copy()

    def propose(self, anchor: int) -> list[int]:
        """What the draft proposes after `anchor`, [depth]; appends nothing."""
        self.core.io["anchor"][self.slot] = anchor
        self.launch("draft")
        proposals: list[int] = self.core.io["proposals"][0].tolist()
        return proposals

    def rewind(self, length: int) -> None:
        """Cut the sequence to its first `length` tokens."""
        self.core.io["length"][self.slot] = length
