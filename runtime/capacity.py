"""How much a loaded core has room for: tokens of all its sequences, and states of prompts that were seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dflash_core.compat import KV_PAGES, SNAPSHOTS
from dflash_core.v1.manifest_pb2 import RebuildManifest


@dataclass(frozen=True, slots=True)
class Capacity:
    """What memory was divided into.

    Attributes:
        kv_tokens: tokens of all sequences together.
        snapshot_slots: states of prompts that were seen; 0 for a target without recurrent states.
        state_nbytes: one sequence's recurrent states, and so one snapshot.
    """

    kv_tokens: int
    snapshot_slots: int
    state_nbytes: int

    def __str__(self) -> str:
        snapshots = f", {self.snapshot_slots:,} snapshot slots" if self.snapshot_slots else ""
        return f"{self.kv_tokens:,} KV tokens{snapshots}"


def capacity_of(manifest: RebuildManifest, symbols: Mapping[str, int]) -> Capacity:
    """What these values of a core's symbols, by name, make room for."""
    contract = manifest.contract
    return Capacity(symbols.get(KV_PAGES, 0) * contract.page_tokens, symbols.get(SNAPSHOTS, 0),
                    contract.state_bytes_per_slot)
