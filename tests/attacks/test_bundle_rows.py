"""Rows 5, 6, 8, 9 and 11 to 19: signature files that other readers of JSON, base64 and DSSE have accepted."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from runtime.trust import TrustPolicy
from runtime.verify import verify
from tests.attacks.limits import refused
from tests.toy_core import Edit, ToyCore, ToyKey, pae, root_digest, signed_bundle, toy_key, trust_document

PARTNER = toy_key("partner")
Bundle = dict[str, Any]


def policy(*keys: ToyKey, threshold: int = 1, **fields: object) -> TrustPolicy:
    return TrustPolicy.parse(json.dumps(trust_document(*keys, threshold=threshold) | fields).encode(), "trust.json")


def typed_as(kind: str, signed_as: str) -> Edit:
    """The payload type of an envelope, and the one that its signature covers."""
    def edit(bundle: Bundle) -> None:
        envelope = bundle["dsseEnvelope"]
        signature = toy_key().private.sign(pae(base64.b64decode(envelope["payload"]), signed_as),
                                           ec.ECDSA(hashes.SHA256()))
        envelope["payloadType"] = kind
        envelope["signatures"][0]["sig"] = base64.b64encode(signature).decode()
    return edit


def material(value: object) -> Edit:
    return lambda bundle: bundle.update(verificationMaterial=value)


def hint(value: object) -> Edit:
    return lambda bundle: bundle["verificationMaterial"]["publicKey"].update(hint=value)


def second_entry(place: int) -> Edit:
    return lambda bundle: bundle["dsseEnvelope"]["signatures"].insert(place, {"sig": "AAAA", "keyid": ""})


def field_added(part: str, name: str) -> Edit:
    def edit(bundle: Bundle) -> None:
        {"bundle": bundle, "envelope": bundle["dsseEnvelope"],
         "signature": bundle["dsseEnvelope"]["signatures"][0]}[part][name] = "none"
    return edit


def payload_as(change: Callable[[str], str]) -> Edit:
    return lambda bundle: bundle["dsseEnvelope"].update(payload=change(bundle["dsseEnvelope"]["payload"]))


def spare_bits(text: str) -> str:
    """Another text for the same bytes: the bits that padding leaves unused are set."""
    body = text.rstrip("=")
    assert body != text, "the payload must need padding"
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    return body[:-1] + alphabet[alphabet.index(body[-1]) + 1] + text[len(body):]


EDITS: list[tuple[str, Edit, str]] = [
    ("5 JSON type, signed as in-toto", typed_as("application/json", "application/vnd.in-toto+json"), "STMT_TYPE"),
    ("5 JSON type, signed as itself", typed_as("application/json", "application/json"), "STMT_TYPE"),
    ("6 raw key", material({"publicKey": {"rawBytes": "AAAA", "hint": toy_key().keyid}}), "SIG_MALFORMED"),
    ("6 raw key alone", material({"publicKey": {"rawBytes": "AAAA"}}), "SIG_MALFORMED"),
    ("6 certificate", material({"certificate": {"rawBytes": "AAAA"}}), "SIG_MALFORMED"),
    ("6 certificate chain", material({"x509CertificateChain": {"certificates": []}}), "SIG_MALFORMED"),
    ("6 hint empty", hint(""), "SIG_MALFORMED"),
    ("6 hint null", hint(None), "SIG_MALFORMED"),
    ("6 hint absent", material({"publicKey": {}}), "SIG_MALFORMED"),
    ("8 two entries, good first", second_entry(1), "SIG_MALFORMED"),
    ("8 two entries, good last", second_entry(0), "SIG_MALFORMED"),
    *((f"11 {name} in the {part}", field_added(part, name), "SIG_MALFORMED")
      for part in ("bundle", "envelope", "signature") for name in ("alg", "jwk", "x5c")),
    ("14 newline", payload_as(lambda text: text[:4] + "\n" + text[4:]), "SIG_MALFORMED"),
    ("14 URL alphabet", payload_as(lambda text: "-_" + text[2:]), "SIG_MALFORMED"),
    ("14 no padding", payload_as(lambda text: text.rstrip("=") or text), "SIG_MALFORMED"),
    ("14 spare bits set", payload_as(spare_bits), "SIG_MALFORMED"),
]


@pytest.mark.parametrize(("edit", "code"), [row[1:] for row in EDITS], ids=[row[0] for row in EDITS])
def test_rejects_bundle_with(toy: ToyCore, trust: TrustPolicy, edit: Edit, code: str) -> None:
    toy.sign(statement=pad_to_a_rest_of_one, bundle=edit)

    with refused(code):
        verify(toy.path, trust)


def pad_to_a_rest_of_one(statement: dict[str, Any]) -> None:
    """Make the payload's base64 end in padding; fields that nobody knows are ignored."""
    statement["pad"] = ""
    while len(json.dumps(statement, sort_keys=True, separators=(",", ":"))) % 3 != 1:
        statement["pad"] += "x"


def test_the_padded_statement_itself_is_accepted(toy: ToyCore, trust: TrustPolicy) -> None:
    toy.sign(statement=pad_to_a_rest_of_one)

    verify(toy.path, trust).close()


def text_of(toy: ToyCore) -> str:
    return toy.signature().read_text()


TEXTS: list[tuple[str, Callable[[ToyCore], bytes]]] = [
    ("13 payload twice", lambda toy: text_of(toy).replace('"payload":', '"payload": "", "payload":').encode()),
    ("13 payload twice, one escaped",
     lambda toy: text_of(toy).replace('"payload":', '"payl\\u006fad": "", "payload":').encode()),
    ("16 200,000 brackets", lambda toy: b"[" * 200_000),
    ("16 200,000 braces", lambda toy: b'{"a":' * 200_000),
    ("16 a 100,000-digit integer", lambda toy: b'{"mediaType": ' + b"9" * 100_000 + b"}"),
    ("16 NaN", lambda toy: text_of(toy).replace("[]", "[NaN]").encode()),
    ("16 byte order mark", lambda toy: b"\xef\xbb\xbf" + text_of(toy).encode()),
    ("16 UTF-16", lambda toy: text_of(toy).encode("utf-16")),
    ("16 text after the end", lambda toy: text_of(toy).encode() + b"x"),
    ("16 two million empty lists", lambda toy: b"[" + b"[]," * ((4 << 20) // 3 - 2) + b"[]]"),
    ("16 a million empty objects", lambda toy: b"[" + b"{}," * ((4 << 20) // 3 - 2) + b"{}]"),
    ("16 a million members", lambda toy: b"{" + b",".join(b'"%x":0' % i for i in range(400_000)) + b"}"),
    ("16 null", lambda toy: b"null"),
    ("16 nothing", lambda toy: b""),
]


@pytest.mark.parametrize("text", [row[1] for row in TEXTS], ids=[row[0] for row in TEXTS])
def test_rejects_signature_file_of(toy: ToyCore, trust: TrustPolicy, text: Callable[[ToyCore], bytes]) -> None:
    data = text(toy)
    assert data != toy.signature().read_bytes()
    toy.signature().write_bytes(data)

    with refused("SIG_MALFORMED"):
        verify(toy.path, trust)


def copied(toy: ToyCore) -> None:
    shutil.copy(toy.signature(), toy.path / "signatures" / "again.sig")


def signed_twice(toy: ToyCore) -> None:
    toy.sign(file_name="again.sig")


def signed_by_partner(toy: ToyCore) -> None:
    toy.sign(PARTNER)


def invalid_signatures(count: int) -> Callable[[ToyCore], None]:
    def write(toy: ToyCore) -> None:
        text = json.dumps(signed_bundle(b"x", toy_key("stranger")))
        for index in range(count):
            (toy.path / "signatures" / f"{index}.sig").write_text(text)
    return write


def large_signature(toy: ToyCore) -> None:
    (toy.path / "signatures" / "large.sig").touch()
    os.truncate(toy.path / "signatures" / "large.sig", 5 << 20)


SIGNERS: list[tuple[str, Callable[[ToyCore], object], TrustPolicy, str]] = [
    ("9 one signature under two names", copied, policy(toy_key(), PARTNER, threshold=2), "ROLE_UNMET"),
    ("9 two signatures by one key", signed_twice, policy(toy_key(), PARTNER, threshold=2), "ROLE_UNMET"),
    ("12 only a revoked key", lambda toy: None, policy(revoked_keys=[toy_key().keyid]), "KEY_REVOKED"),
    ("12 a revoked key fills the threshold", signed_by_partner,
     policy(toy_key(), PARTNER, threshold=2, revoked_keys=[PARTNER.keyid]), "KEY_REVOKED"),
    ("15 17 signature files", invalid_signatures(16), policy(), "SIG_LIMIT"),
    ("15 500 invalid signatures", invalid_signatures(500), policy(), "SIG_LIMIT"),
    ("15 a signature of 5 MiB", large_signature, policy(), "SIG_LIMIT"),
]


@pytest.mark.parametrize(("change", "signers", "code"), [row[1:] for row in SIGNERS], ids=[row[0] for row in SIGNERS])
def test_rejects_signatures(
    toy: ToyCore, change: Callable[[ToyCore], object], signers: TrustPolicy, code: str
) -> None:
    change(toy)

    with refused(code):
        verify(toy.path, signers)


def without_a_file(statement: dict[str, Any]) -> None:
    resources = statement["predicate"]["resources"]
    resources.pop()
    statement["subject"][0]["digest"]["sha256"] = root_digest(resources)


def test_rejects_signers_who_disagree(toy: ToyCore) -> None:
    toy.sign(PARTNER, statement=without_a_file)

    with refused("SIG_CONFLICT"):
        verify(toy.path, policy(toy_key(), PARTNER))


@pytest.mark.parametrize("edit", [
    lambda statement: statement.pop("predicate"), lambda statement: statement.update(subject=[]),
    lambda statement: statement["predicate"]["resources"][0].update(digest="00"),
], ids=["no predicate", "no subject", "a short digest"])
def test_rejects_statement_of_another_shape(toy: ToyCore, trust: TrustPolicy, edit: Edit) -> None:
    toy.sign(statement=edit)

    with refused("STMT_MALFORMED"):
        verify(toy.path, trust)


def serialization(**fields: object) -> Edit:
    return lambda statement: statement["predicate"]["serialization"].update(fields)


def one_sha1(statement: dict[str, Any]) -> None:
    statement["predicate"]["resources"][0]["algorithm"] = "sha1"


STATEMENTS: list[tuple[str, Edit]] = [
    ("17 the old predicate", lambda s: s.update(predicateType="https://model_signing/Digests/v0.1")),
    ("18 shards", serialization(method="shards", shard_size=1_000_000)),
    ("18 blake3", serialization(hash_type="blake3")),
    ("18 symbolic links", serialization(allow_symlinks=True)),
    ("18 one sha1", one_sha1),
    ("19 ignores modules", serialization(ignore_paths=["modules"])),
    ("19 ignores everything", serialization(ignore_paths=["*"])),
]


@pytest.mark.parametrize("edit", [row[1] for row in STATEMENTS], ids=[row[0] for row in STATEMENTS])
def test_rejects_statement_with(toy: ToyCore, trust: TrustPolicy, edit: Edit) -> None:
    toy.sign(statement=edit)

    with refused("STMT_UNSUPPORTED"):
        verify(toy.path, trust)
