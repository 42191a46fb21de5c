"""Whose signatures are accepted: the trust file, which belongs to the machine that loads and never to a core.

    trust = TrustPolicy.load(Path("trust.json"))
    signers = trust.accept({"9f3c…", "17aa…"})     # key ids whose signatures have verified

The file names keys, puts them into roles with thresholds, and says which roles must be met. It also revokes keys and
digests and holds the lowest release of each core that may still be loaded.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

from dflash_core.errors import PolicyError, VerificationError

from .bundle import StrictJsonError, is_sha256, parse_strict_json
from .keys import PublicKey, keyid, load_public_key

FORMAT = "dflash-trust/1"
MAX_TRUST_BYTES = 1 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A key that the trust file holds."""

    keyid: str
    public_key: PublicKey
    owner: str


@dataclass(frozen=True, slots=True)
class Role:
    """A role is met when `threshold` distinct keys of it have signed."""

    name: str
    keyids: frozenset[str]
    threshold: int


@dataclass(frozen=True, slots=True)
class Signer:
    """A key whose signature on a core has verified and counts."""

    keyid: str
    owner: str
    roles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TrustPolicy:
    """A trust file, read and checked.

    Attributes:
        keys: every key the file holds, by key id.
        roles: every role, by name.
        require: the roles that must all be met; never empty.
        revoked_keys: key ids whose signatures count for nothing, whenever they were made.
        revoked_sha256: digests (hex) of manifests or of any other file that must not be loaded.
        min_release: core name -> lowest release accepted.
        source: device and inode of the file, so that a policy from inside a core is recognized; None when it was
            not read from a file.
    """

    keys: Mapping[str, TrustedKey]
    roles: Mapping[str, Role]
    require: tuple[str, ...]
    revoked_keys: frozenset[str]
    revoked_sha256: frozenset[str]
    min_release: Mapping[str, int]
    source: tuple[int, int] | None = None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a trust file once.

        Raises:
            PolicyError: POLICY_MISSING; POLICY_UNSAFE when it is not a regular file or group or others can write it;
                POLICY_MALFORMED when a rule of the format is broken; KEY_UNSUPPORTED for a key on another curve.
        """
        where = str(path)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as err:
            raise PolicyError(
                "POLICY_MISSING", f"cannot open the trust file: {err.strerror}", where=where,
                hint="pass --trust PATH, or make a key and a trust file with `dflash-run keygen DIR`",
            ) from err
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise PolicyError("POLICY_UNSAFE", "the trust file is not a regular file", where=where)
            if status.st_mode & 0o022:
                raise PolicyError(
                    "POLICY_UNSAFE", "others can write the trust file", where=where, expected="mode 0644 or less",
                    got=f"mode {stat.S_IMODE(status.st_mode):04o}", hint=f"chmod go-w {path}",
                )
            data = os.read(fd, MAX_TRUST_BYTES + 1)
        finally:
            os.close(fd)
        return cls.parse(data, where, source=(status.st_dev, status.st_ino))

    @classmethod
    def parse(cls, data: bytes, where: str, *, source: tuple[int, int] | None = None) -> Self:
        """The policy that the bytes of a trust file state; raises as `load` does."""
        reader = _Reader(where)
        if len(data) > MAX_TRUST_BYTES:
            reader.fail("the trust file is too large", expected=f"at most {MAX_TRUST_BYTES} bytes")
        try:
            document = parse_strict_json(data)
        except StrictJsonError as err:
            reader.fail(f"the trust file is not strict JSON: {err}")
        fields = reader.fields(document, "trust file", {"format", "keys", "roles", "require"},
                               {"revoked_keys", "revoked_sha256", "min_release"})
        if fields["format"] != FORMAT:
            reader.fail("another format", expected=FORMAT, got=fields["format"])
        keys = {name: _key(name, value, reader) for name, value in reader.mapping(fields["keys"], "keys").items()}
        roles = {name: _role(name, value, keys, reader)
                 for name, value in reader.mapping(fields["roles"], "roles").items()}
        require = reader.strings(fields["require"], "require")
        _check_required(require, roles, reader)
        releases = reader.mapping(fields.get("min_release", {}), "min_release")
        return cls(
            keys=keys, roles=roles, require=require,
            revoked_keys=reader.digests(fields.get("revoked_keys", []), "revoked_keys"),
            revoked_sha256=reader.digests(fields.get("revoked_sha256", []), "revoked_sha256"),
            min_release={name: reader.integer(value, f"min_release of {name}") for name, value in releases.items()},
            source=source,
        )

    def accept(self, verified: Set[str]) -> tuple[Signer, ...]:
        """The signers that count, once every required role is met.

        Args:
            verified: ids of keys of this policy whose signatures have verified, revoked ones included.
        Raises:
            VerificationError: ROLE_UNMET, or KEY_REVOKED when only a revoked key is what a role lacks.
        """
        counted = verified - self.revoked_keys
        for name in self.require:
            role = self.roles[name]
            reached = len(role.keyids & counted)
            if reached >= role.threshold:
                continue
            with_revoked = len(role.keyids & verified)
            where = f"role {name}"
            if with_revoked >= role.threshold:
                raise VerificationError(
                    "KEY_REVOKED", "a role is met only with a revoked key", where=where,
                    expected=f"{role.threshold} signers", got=f"{reached} and {with_revoked - reached} revoked",
                    hint="have the core signed again with a key that is not revoked",
                )
            raise VerificationError(
                "ROLE_UNMET", "too few trusted keys have signed this core", where=where,
                expected=f"{role.threshold} of {len(role.keyids)} keys", got=reached,
                hint="check that the trust file names the core's signers, or have the core signed by them",
            )
        return tuple(
            Signer(name, self.keys[name].owner,
                   tuple(sorted(role.name for role in self.roles.values() if name in role.keyids)))
            for name in sorted(counted)
        )


def _key(name: str, value: object, reader: _Reader) -> TrustedKey:
    place = f"key {name[:64]}"
    fields = reader.fields(value, place, {"pem"}, {"owner"})
    pem = reader.typed(fields["pem"], str, f"pem of {place}")
    public_key = load_public_key(pem.encode("utf-8", "backslashreplace"), f"{place} in {reader.where}")
    found = keyid(public_key)
    if found != name:
        reader.fail("a key is listed under an id that is not its own", expected=found, got=name)
    return TrustedKey(name, public_key, reader.typed(fields.get("owner", ""), str, f"owner of {place}"))


def _role(name: str, value: object, keys: Mapping[str, TrustedKey], reader: _Reader) -> Role:
    fields = reader.fields(value, f"role {name}", {"keys", "threshold"})
    keyids = reader.strings(fields["keys"], f"keys of role {name}")
    unknown = sorted(set(keyids) - keys.keys())
    if unknown:
        reader.fail(f"role {name} uses a key that is not defined", got=unknown[0])
    threshold = reader.integer(fields["threshold"], f"threshold of role {name}")
    if not 1 <= threshold <= len(keyids):
        reader.fail(f"the threshold of role {name} cannot be reached, or asks for nothing",
                    expected=f"1 to {len(keyids)}", got=threshold)
    return Role(name, frozenset(keyids), threshold)


def _check_required(require: tuple[str, ...], roles: Mapping[str, Role], reader: _Reader) -> None:
    if not require:
        reader.fail("no role is required", expected="at least one role in `require`", got="none")
    seen: dict[str, str] = {}
    for name in require:
        if name not in roles:
            reader.fail("a required role is not defined", got=name)
        for key in sorted(roles[name].keyids):
            if key in seen:
                reader.fail("a key is in two required roles", got=f"{key} in {seen[key]} and {name}")
            seen[key] = name


@dataclass(frozen=True, slots=True)
class _Reader:
    """Takes the trust file apart; everything it refuses is POLICY_MALFORMED."""

    where: str

    def fail(self, what: str, *, expected: object = None, got: object = None) -> NoReturn:
        raise PolicyError("POLICY_MALFORMED", what, where=self.where, expected=expected,
                          got=None if got is None else ascii(got)[:200])

    def typed(self, value: object, kind: type[T], name: str) -> T:
        if not isinstance(value, kind):
            self.fail(f"{name} has another type", expected=kind.__name__, got=type(value).__name__)
        return value

    def mapping(self, value: object, name: str) -> dict[str, Any]:
        return self.typed(value, dict, name)

    def fields(
        self, value: object, name: str, required: Set[str], optional: Set[str] = frozenset()
    ) -> dict[str, Any]:
        found = self.mapping(value, name)
        if not required <= found.keys() <= required | optional:
            self.fail(f"the fields of the {name} are not the known ones",
                      expected=", ".join(sorted(required)), got=", ".join(sorted(found)))
        return found

    def strings(self, value: object, name: str) -> tuple[str, ...]:
        items = tuple(self.typed(item, str, f"an entry of {name}") for item in self.typed(value, list, name))
        if len(set(items)) != len(items):
            self.fail(f"{name} repeats an entry")
        return items

    def digests(self, value: object, name: str) -> frozenset[str]:
        items = self.strings(value, name)
        for item in items:
            if not is_sha256(item):
                self.fail(f"an entry of {name} is not a SHA-256", expected="64 lower-case hex digits", got=item)
        return frozenset(items)

    def integer(self, value: object, name: str) -> int:
        number = self.typed(value, int, name)
        if isinstance(value, bool) or number < 0:
            self.fail(f"{name} is not a count", expected="an integer of at least 0", got=value)
        return number
