"""Match a checkpoint's tensors with the ones its config describes: every tensor is claimed, or named in one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflash_core.errors import CheckpointError

from exporter.checkpoint import Checkpoint

WEIGHT_DTYPES = ("BF16", "F16", "F32")


def claim_tensors(
    checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, str]
) -> dict[str, str]:
    """Check that `found` is exactly `expected`, in shape and in an unquantized dtype.

    Args:
        checkpoint: what is read.
        expected: shape by canonical name.
        found: canonical name by checkpoint name, for every tensor that is to be claimed.
    Returns:
        Checkpoint name by canonical name, in the order of `expected`.
    Raises:
        CheckpointError: TENSORS, listing all that is missing, unclaimed, given twice, misshapen or of another dtype.
    """
    by_canonical: dict[str, str] = {}
    twice: list[str] = []
    for name, canonical in found.items():
        if canonical in by_canonical:
            twice.append(f"{by_canonical[canonical]} and {name}")
        by_canonical[canonical] = name
    missing = [name for name in expected if name not in by_canonical]
    unclaimed = [name for name, canonical in found.items() if canonical not in expected]
    misshapen, mistyped = [], []
    for canonical, shape in expected.items():
        entry = checkpoint.tensors.get(by_canonical.get(canonical, ""))
        if entry is None:
            continue
        if entry.shape != shape:
            misshapen.append(f"{entry.name} in {entry.shard}: expected {list(shape)}, got {list(entry.shape)}")
        if entry.dtype not in WEIGHT_DTYPES:
            mistyped.append(f"{entry.name} in {entry.shard}: expected {' '.join(WEIGHT_DTYPES)}, got {entry.dtype}")
    kinds = {
        "missing": missing, "unclaimed": unclaimed, "given twice": twice, "wrong shape": misshapen,
        "wrong dtype": mistyped,
    }  # fmt: skip
    if any(kinds.values()):
        raise CheckpointError(
            "TENSORS", "checkpoint does not hold exactly the tensors that its config describes",
            where=str(checkpoint.path), expected=f"{len(expected)} tensors",
            got=f"{len(found)} ({'; '.join(f'{kind}: {_listed(names)}' for kind, names in kinds.items() if names)})",
            hint="config.json and weights are of two models, or the model is a variant that is not supported",
        )
    return {canonical: by_canonical[canonical] for canonical in expected}


def _listed(names: Sequence[str], limit: int = 12) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
