"""What `dflash-run verify` says about one core after another.

    report = verify_one(path, policy, device="cpu", full=True, on_bytes=None)
    report.as_dict()
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.compat import Requirement, requirements, select_target
from dflash_core.effective import effective_precision
from dflash_core.errors import CompatibilityError, DflashError

from .check import query_device
from .console import human_bytes, printable
from .corefiles import OnBytes
from .trust import Signer, TrustPolicy
from .verify import VerifiedCore, verify


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """A core that verified, and how its requirements compare with this machine (empty: nobody asked)."""

    path: Path
    core_name: str
    release: int
    core_digest: str
    files: int
    nbytes: int
    full: bool
    models: str
    precision: tuple[tuple[str, str], ...]
    signers: tuple[Signer, ...]
    requirements: tuple[Requirement, ...]

    @property
    def fits(self) -> bool:
        """Whether every requirement that was compared is met."""
        return all(item.met for item in self.requirements)

    def as_dict(self) -> dict[str, Any]:
        """The report as `--json` prints it."""
        document: dict[str, Any] = {
            "core": str(self.path), "core_name": self.core_name, "release": self.release,
            "core_digest": self.core_digest, "full": self.full, "nbytes": self.nbytes,
            "signers": [{"keyid": signer.keyid, "owner": signer.owner, "roles": list(signer.roles)}
                        for signer in self.signers],
        }
        if self.requirements:
            document["requirements"] = [
                {"name": item.name, "expected": item.expected, "found": item.found, "met": item.met}
                for item in self.requirements
            ]
        return document

    def line(self) -> str:
        """The core on one line."""
        word = "authentic" if self.fits else "unfit"
        return (f"{word:<10}  {printable(self.core_name)}   release {self.release}   {self.core_digest[:16]}…   "
                f"{human_bytes(self.nbytes)}   {printable(str(self.path))}")

    def lines(self) -> Iterator[str]:
        """The core for a person who looks at one."""
        yield f"authentic   {printable(self.core_name)}   release {self.release}"
        yield f"digest      {self.core_digest}"
        for signer in self.signers:
            yield f"signed by   {printable(signer.owner)} ({', '.join(signer.roles)})   key {signer.keyid[:16]}…"
        if not self.full:
            yield "weights     each chunk is verified as it is loaded; --full reads them all now"
        yield f"models      {printable(self.models)}"
        yield f"precision   {printable(', '.join(f'{role} {value}' for role, value in self.precision))}"
        for item in self.requirements:
            yield f"{'met' if item.met else 'NOT MET':<10}  {item.name}: expected {item.expected}, found {item.found}"


def verify_one(
    path: Path, trust: TrustPolicy, *, device: str | None, full: bool, on_bytes: OnBytes | None
) -> VerifyReport:
    """Verify a core, read all of it if asked to, and compare its requirements with a device if one is named.

    Raises:
        DflashError: as `verify` and `VerifiedCore.read_full`; DEVICE_UNKNOWN.
    """
    with verify(path, trust) as core:
        if full:
            core.read_full(on_bytes)
        manifest = core.manifest
        models = [manifest.target.repository or manifest.target.architecture]
        if manifest.speculation.HasField("draft"):
            draft = manifest.speculation.draft
            models.append(f"draft {draft.repository or draft.architecture}")
        return VerifyReport(
            path=path, core_name=manifest.core_name, release=manifest.release, core_digest=core.core_digest,
            files=len(manifest.files) + 1, nbytes=core.nbytes, full=full, models=", ".join(filter(None, models)),
            precision=tuple((item.role.value, item.text) for item in effective_precision(manifest)),
            signers=core.signers, requirements=() if device is None else _compare(core, device),
        )


def refusal(path: Path, error: DflashError) -> str:
    """A core that was refused, on one line."""
    return f"{'refused':<10}  {error.code}   {printable(str(path))}"


def _compare(core: VerifiedCore, device_name: str) -> tuple[Requirement, ...]:
    device = query_device(device_name)
    try:
        target = select_target(core.manifest, device)
    except CompatibilityError as err:
        return (Requirement("device target", err.expected or "", err.got or device.name, False),)
    return (Requirement("device target", target.name, device.name, True), *requirements(core.manifest, device))
