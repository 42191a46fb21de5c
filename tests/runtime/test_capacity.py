"""What a person reads about a core's room."""

from __future__ import annotations

import pytest
from dflash_core.v1.manifest_pb2 import RebuildManifest

from runtime.capacity import Capacity, capacity_of


@pytest.mark.parametrize(("snapshots", "text"), [(0, "24,576 KV tokens"), (12, "24,576 KV tokens, 12 snapshot slots")])
def test_room_is_told_in_tokens_and_states(snapshots, text):
    manifest = RebuildManifest()
    manifest.contract.page_tokens, manifest.contract.state_bytes_per_slot = 64, 1000
    symbols = {"kv_pages": 384} | ({"snapshots": snapshots} if snapshots else {})

    room = capacity_of(manifest, symbols)

    assert room == Capacity(24576, snapshots, 1000)
    assert str(room) == text
