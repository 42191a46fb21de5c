"""The signature file: one OpenSSF Model Signing bundle, read strictly and checked before its payload is parsed.

    bundle = parse_bundle(data, "signatures/ab….sig")     # exact JSON, strict base64; nothing is trusted yet
    check_signature(bundle, public_key, where)             # over the payload bytes as stored
    statement = parse_statement(bundle.payload, where)     # only now: which files, with which digests

A bundle is a Sigstore bundle v0.3 around one DSSE envelope around one in-toto statement. Readers elsewhere accept
more than this one does; every latitude that two readers could use differently is refused here by name.

Source: OpenSSF Model Signing v1.0, method `key`; DSSE v1 for the bytes that are signed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from dflash_core.errors import VerificationError

from .keys import PublicKey, signature_hash

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
IGNORED_PATHS = (".git", ".gitattributes", ".github", ".gitignore", "signatures")
MAX_FILES = 4096

_HEX_64 = re.compile(r"[0-9a-f]{64}")
_PART = r"[a-z0-9](?:[a-z0-9._-]{0,158}[a-z0-9_-])?"
_NAME = re.compile(rf"{_PART}(?:/{_PART}){{0,2}}")
_IGNORED_SIGNATURE = re.compile(rf"signatures/{_PART}")
_MAX_INTEGER_CHARS = 20

T = TypeVar("T")


class StrictJsonError(ValueError):
    """The bytes are not JSON in the one form that is accepted; callers turn it into their own typed error."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """The fields of a signature file that carry meaning. Authentic only after `check_signature`."""

    hint: str
    payload_type: str
    payload: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class Statement:
    """What a signer stated: every file of the core outside signatures/, name -> SHA-256 in hex."""

    digests: Mapping[str, str]


def is_name(name: str) -> bool:
    """Whether `name` can be the path of a file in a core: one to three lower-case ASCII parts joined by `/`."""
    return _NAME.fullmatch(name) is not None


def is_sha256(text: object) -> bool:
    """Whether `text` is 64 lower-case hex digits."""
    return isinstance(text, str) and _HEX_64.fullmatch(text) is not None


def parse_strict_json(data: bytes) -> Any:
    """Parse JSON that every parser reads in the same way.

    UTF-8 without a byte order mark, no key twice in an object, no floats and no constants such as NaN, integers of
    at most 20 characters, nothing after the value.

    Raises:
        StrictJsonError: any of these rules is broken, or the nesting is deeper than the parser goes.
    """
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique_keys, parse_int=_short_integer,
            parse_float=_refuse_number, parse_constant=_refuse_number,
        )
    except RecursionError as err:
        raise StrictJsonError("nested too deeply") from err
    except StrictJsonError:
        raise
    except ValueError as err:
        raise StrictJsonError(str(err)) from err


def decode_strict_base64(text: str) -> bytes:
    """Decode base64 in its one canonical spelling.

    Raises:
        ValueError: another alphabet, white space, missing padding, or spare bits that are set.
    """
    data = base64.b64decode(text.encode("ascii"), validate=True)
    if base64.b64encode(data).decode("ascii") != text:
        raise ValueError("not the canonical spelling")
    return data


def signed_bytes(payload_type: str, payload: bytes) -> bytes:
    """The bytes that a DSSE signature covers; lengths are byte lengths in decimal."""
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def parse_bundle(data: bytes, where: str) -> Bundle:
    """Read a signature file; exactly the fields that the format has, and nothing beside them.

    Args:
        data: the file's bytes, at most 4 MiB.
        where: the file's name, for messages.
    Raises:
        VerificationError: SIG_MALFORMED.
    """
    rule = _Rule("SIG_MALFORMED", where)
    try:
        document = parse_strict_json(data)
    except StrictJsonError as err:
        rule.fail(f"the signature file is not strict JSON: {err}")
    fields = rule.fields(document, "bundle", {"mediaType", "verificationMaterial", "dsseEnvelope"})
    if fields["mediaType"] != MEDIA_TYPE:
        rule.fail("another media type", expected=MEDIA_TYPE, got=fields["mediaType"])
    material = rule.fields(fields["verificationMaterial"], "verificationMaterial", {"publicKey"}, {"tlogEntries"})
    if material.get("tlogEntries", []) != []:
        rule.fail("tlogEntries is not an empty list", got=material["tlogEntries"])
    hint = rule.fields(material["publicKey"], "publicKey", {"hint"})["hint"]
    if not is_sha256(hint):
        rule.fail("the key hint is not a key id", expected="64 lower-case hex digits", got=hint)
    envelope = rule.fields(fields["dsseEnvelope"], "dsseEnvelope", {"payload", "payloadType", "signatures"})
    signatures = rule.typed(envelope["signatures"], list, "signatures")
    if len(signatures) != 1:
        rule.fail("an envelope holds exactly one signature", expected=1, got=len(signatures))
    entry = rule.fields(signatures[0], "signature", {"sig"}, {"keyid"})
    if entry.get("keyid") not in (None, ""):
        rule.fail("the inner keyid is not empty", got=entry["keyid"])
    return Bundle(
        hint=hint,
        payload_type=rule.typed(envelope["payloadType"], str, "payloadType"),
        payload=rule.base64(envelope["payload"], "payload"),
        signature=rule.base64(entry["sig"], "sig"),
    )


def check_signature(bundle: Bundle, key: PublicKey, where: str) -> None:
    """Check that `key` signed the bundle's payload, as the one payload type that is accepted.

    Raises:
        VerificationError: STMT_TYPE for another payload type; SIG_INVALID when the signature does not verify.
    """
    if bundle.payload_type != PAYLOAD_TYPE:
        raise VerificationError("STMT_TYPE", "the signature is over something that is not a statement", where=where,
                                expected=PAYLOAD_TYPE, got=_shown(bundle.payload_type))
    try:
        key.verify(bundle.signature, signed_bytes(PAYLOAD_TYPE, bundle.payload), ec.ECDSA(signature_hash(key)))
    except InvalidSignature as err:
        raise VerificationError(
            "SIG_INVALID", "the signature does not verify under the key that it names", where=where,
            expected=f"a signature by {bundle.hint}",
            hint="fetch the core again; if it stays, ask the signer to sign it again",
        ) from err


def parse_statement(payload: bytes, where: str) -> Statement:
    """Read the statement of a bundle whose signature has verified.

    Raises:
        VerificationError: STMT_MALFORMED, STMT_UNSUPPORTED, STMT_NAME or STMT_ROOT.
    """
    rule = _Rule("STMT_MALFORMED", where)
    try:
        document = parse_strict_json(payload)
    except StrictJsonError as err:
        rule.fail(f"the statement is not strict JSON: {err}")
    statement = rule.typed(document, dict, "statement")
    _supported(statement.get("_type"), STATEMENT_TYPE, "_type", where)
    _supported(statement.get("predicateType"), PREDICATE_TYPE, "predicateType", where)
    subjects = rule.typed(statement.get("subject"), list, "subject")
    if len(subjects) != 1:
        rule.fail("a statement has exactly one subject", expected=1, got=len(subjects))
    subject_digest = rule.typed(rule.typed(subjects[0], dict, "subject").get("digest"), dict, "subject digest")
    predicate = rule.typed(statement.get("predicate"), dict, "predicate")
    _check_serialization(rule.typed(predicate.get("serialization"), dict, "serialization"), where)
    resources = rule.typed(predicate.get("resources"), list, "resources")
    if len(resources) > MAX_FILES:
        rule.fail("the statement lists too many files", expected=f"at most {MAX_FILES}", got=len(resources))
    digests: dict[str, str] = {}
    root = hashlib.sha256()
    for resource in resources:
        name, digest = _resource(resource, rule)
        if not is_name(name) or name in digests:
            problem = "the statement lists a file twice" if name in digests else "a file name is not allowed"
            raise VerificationError("STMT_NAME", problem, where=where, got=_shown(name),
                                    expected="one to three parts of a-z 0-9 . _ - joined by /")
        digests[name] = digest
        root.update(bytes.fromhex(digest))
    if subject_digest.get("sha256") != root.hexdigest():
        raise VerificationError("STMT_ROOT", "the root digest does not follow from the files listed", where=where,
                                expected=root.hexdigest(), got=_shown(subject_digest.get("sha256")))
    return Statement(digests)


def encode_statement(core_name: str, digests: Mapping[str, str]) -> bytes:
    """The statement over `digests` (name -> SHA-256 in hex), in the one form that we write.

    Files come in the order of their path components, keys sorted, no spaces: equal cores give equal bytes.
    """
    names = sorted(digests, key=lambda name: name.split("/"))
    root = hashlib.sha256(b"".join(bytes.fromhex(digests[name]) for name in names)).hexdigest()
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": core_name, "digest": {"sha256": root}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": {
                "method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": list(IGNORED_PATHS),
            },
            "resources": [{"name": name, "algorithm": "sha256", "digest": digests[name]} for name in names],
        },
    }
    return json.dumps(statement, sort_keys=True, separators=(",", ":")).encode("ascii")


def encode_bundle(bundle: Bundle) -> bytes:
    """The bundle as the bytes of a signature file."""
    document = {
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": bundle.hint}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(bundle.payload).decode("ascii"),
            "payloadType": bundle.payload_type,
            "signatures": [{"sig": base64.b64encode(bundle.signature).decode("ascii"), "keyid": ""}],
        },
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")


@dataclass(frozen=True, slots=True)
class _Rule:
    """Raises one code at one place, for the shape checks of a document."""

    code: str
    where: str

    def fail(self, what: str, *, expected: object = None, got: object = None) -> NoReturn:
        raise VerificationError(self.code, what, where=self.where, expected=expected,
                                got=None if got is None else _shown(got),
                                hint="fetch the core again, or have it signed again")

    def typed(self, value: object, kind: type[T], name: str) -> T:
        if not isinstance(value, kind) or isinstance(value, bool):
            self.fail(f"{name} has another type", expected=kind.__name__, got=type(value).__name__)
        return value

    def fields(
        self, value: object, name: str, required: Set[str], optional: Set[str] = frozenset()
    ) -> dict[str, Any]:
        found: dict[str, Any] = self.typed(value, dict, name)
        if not required <= found.keys() <= required | optional:
            self.fail(f"{name} does not have exactly the known fields", expected=", ".join(sorted(required)),
                      got=", ".join(sorted(found)))
        return found

    def base64(self, value: object, name: str) -> bytes:
        try:
            return decode_strict_base64(self.typed(value, str, name))
        except ValueError as err:
            self.fail(f"{name} is not strict base64: {err}")


def _check_serialization(serialization: Mapping[str, object], where: str) -> None:
    _supported(serialization.get("method"), "files", "method", where)
    _supported(serialization.get("hash_type"), "sha256", "hash_type", where)
    _supported(serialization.get("allow_symlinks"), False, "allow_symlinks", where)
    ignored = serialization.get("ignore_paths", [])
    if not isinstance(ignored, list):
        _Rule("STMT_MALFORMED", where).fail("ignore_paths is not a list", got=ignored)
    for path in ignored:
        if path not in IGNORED_PATHS and not (isinstance(path, str) and _IGNORED_SIGNATURE.fullmatch(path)):
            raise VerificationError(
                "STMT_UNSUPPORTED", "the signer left out files that must be signed", where=where,
                expected="git files, signatures, or signatures/NAME in lower case", got=_shown(path),
            )


def _supported(value: object, expected: str | bool, name: str, where: str) -> None:
    if value != expected or type(value) is not type(expected):
        raise VerificationError("STMT_UNSUPPORTED", f"the statement's {name} is not one that this runtime reads",
                                where=where, expected=expected, got=_shown(value),
                                hint="sign with dflash, or with `model_signing sign key` 1.1.1")


def _resource(resource: object, rule: _Rule) -> tuple[str, str]:
    fields: dict[str, object] = rule.typed(resource, dict, "resource")
    _supported(fields.get("algorithm"), "sha256", "algorithm", rule.where)
    digest = fields.get("digest")
    if not isinstance(digest, str) or not is_sha256(digest):
        rule.fail("a digest is not a SHA-256", expected="64 lower-case hex digits", got=digest)
    return rule.typed(fields.get("name"), str, "name"), digest


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise StrictJsonError("a key is repeated in an object")
    return found


def _short_integer(text: str) -> int:
    if len(text) > _MAX_INTEGER_CHARS:
        raise StrictJsonError(f"an integer of {len(text)} characters")
    return int(text)


def _refuse_number(text: str) -> NoReturn:
    raise StrictJsonError(f"a number that is not an integer: {text[:20]}")


def _shown(value: object) -> str:
    """A value from an untrusted file as short ASCII text, safe for any terminal."""
    if not isinstance(value, str | int | None):
        return type(value).__name__
    text = ascii(value)[1:-1] if isinstance(value, str) else str(value)
    return text if len(text) <= 200 else text[:200] + "…"
