"""The signature file: exact JSON, strict base64, the signed bytes, and the statement inside."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from dflash_core.errors import VerificationError

from runtime.bundle import (
    Bundle,
    StrictJsonError,
    check_signature,
    encode_bundle,
    encode_statement,
    is_name,
    parse_bundle,
    parse_statement,
    parse_strict_json,
    signed_bytes,
)
from tests.toy_core import root_digest, signed_bundle, toy_key, with_root

KEY = toy_key()
PUBLIC = KEY.private.public_key()
Document = dict[str, Any]


def statement() -> Document:
    resources = [{"name": name, "algorithm": "sha256", "digest": digit * 64}
                 for name, digit in (("config/a", "1"), ("manifest.pb", "2"))]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "toy", "digest": {"sha256": root_digest(resources)}}],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {
            "serialization": {"method": "files", "hash_type": "sha256", "allow_symlinks": False,
                              "ignore_paths": [".git", ".gitattributes", ".github", ".gitignore", "signatures"]},
            "resources": resources,
        },
    }


def bundle() -> Document:
    return signed_bundle(json.dumps(statement()).encode(), KEY)


def code_of(act: Callable[[], object]) -> str:
    with pytest.raises(VerificationError) as caught:
        act()
    return caught.value.code


def set_hint(value: object) -> Callable[[Document], object]:
    return lambda d: d["verificationMaterial"]["publicKey"].update(hint=value)


def set_sig(value: object) -> Callable[[Document], object]:
    return lambda d: d["dsseEnvelope"]["signatures"][0].update(sig=value)


def change_sig(change: Callable[[str], str]) -> Callable[[Document], object]:
    def apply(document: Document) -> None:
        entry = document["dsseEnvelope"]["signatures"][0]
        entry["sig"] = change(entry["sig"])
    return apply


def append_signature(document: Document) -> None:
    document["dsseEnvelope"]["signatures"].append({"sig": "AAAA", "keyid": ""})


def insert_signature(document: Document) -> None:
    document["dsseEnvelope"]["signatures"].insert(0, {"sig": "AAAA", "keyid": ""})


def raw_key(document: Document) -> None:
    document["verificationMaterial"]["publicKey"] = {"rawBytes": "AAAA", "hint": KEY.keyid}


def certificate(document: Document) -> None:
    document["verificationMaterial"] = {"certificate": {"rawBytes": "AAAA"}}


@pytest.mark.parametrize("edit", [
    pytest.param(lambda d: d.update(mediaType="application/vnd.dev.sigstore.bundle+json;version=0.3"), id="media type"),
    pytest.param(lambda d: d.pop("mediaType"), id="no media type"),
    pytest.param(lambda d: d.update(jwk={}), id="field added to bundle"),
    pytest.param(lambda d: d["dsseEnvelope"].update(alg="none"), id="field added to envelope"),
    pytest.param(lambda d: d["dsseEnvelope"]["signatures"][0].update(x5c=[]), id="field added to signature"),
    pytest.param(lambda d: d["verificationMaterial"].update(x509CertificateChain={}), id="field added to material"),
    pytest.param(raw_key, id="raw key"),
    pytest.param(certificate, id="certificate"),
    pytest.param(lambda d: d["verificationMaterial"]["publicKey"].pop("hint"), id="no hint"),
    pytest.param(set_hint(""), id="empty hint"),
    pytest.param(set_hint(None), id="null hint"),
    pytest.param(set_hint(KEY.keyid.upper()), id="hint in capitals"),
    pytest.param(set_hint(KEY.keyid + "\n"), id="hint with newline"),
    pytest.param(lambda d: d["verificationMaterial"].update(tlogEntries=[{}]), id="log entry"),
    pytest.param(lambda d: d["dsseEnvelope"].update(signatures=[]), id="no signature"),
    pytest.param(lambda d: d["dsseEnvelope"].update(signatures={}), id="signatures is an object"),
    pytest.param(append_signature, id="two signatures, good first"),
    pytest.param(insert_signature, id="two signatures, good last"),
    pytest.param(lambda d: d["dsseEnvelope"]["signatures"][0].update(keyid="x"), id="inner keyid"),
    pytest.param(lambda d: d["dsseEnvelope"].update(payloadType=1), id="payload type is a number"),
    pytest.param(lambda d: d["dsseEnvelope"].update(payload=None), id="payload is null"),
    pytest.param(set_sig(1), id="signature is a number"),
    pytest.param(set_sig("é"), id="signature not ASCII"),
    pytest.param(change_sig(lambda sig: sig[:4] + "\n" + sig[4:]), id="base64 with newline"),
    pytest.param(set_sig("-_-_"), id="URL alphabet"),
    pytest.param(set_sig("AAA"), id="no padding"),
    pytest.param(set_sig("AAAA===="), id="more padding"),
    pytest.param(set_sig("AAB="), id="spare bits set"),
])
def test_rejects_bundle_that_is_not_exact(edit: Callable[[Document], object]) -> None:
    document = bundle()
    edit(document)

    assert code_of(lambda: parse_bundle(json.dumps(document).encode(), "x.sig")) == "SIG_MALFORMED"


def _text() -> str:
    return json.dumps(bundle())


@pytest.mark.parametrize("data", [
    pytest.param(lambda: b"", id="empty"),
    pytest.param(lambda: b"null", id="null"),
    pytest.param(lambda: b"[]", id="list"),
    pytest.param(lambda: b"[" * 200_000, id="200,000 brackets"),
    pytest.param(lambda: b"9" * 100_000, id="100,000 digits"),
    pytest.param(lambda: b'{"mediaType": NaN}', id="NaN"),
    pytest.param(lambda: b'{"mediaType": 1.0}', id="float"),
    pytest.param(lambda: b"\xef\xbb\xbf" + _text().encode(), id="byte order mark"),
    pytest.param(lambda: _text().encode("utf-16"), id="UTF-16"),
    pytest.param(lambda: b"\xff" + _text().encode(), id="not UTF-8"),
    pytest.param(lambda: _text().encode() + b"{}", id="text after the end"),
    pytest.param(lambda: _text().replace('"payload"', '"payload": "", "payload"').encode(), id="payload twice"),
    pytest.param(lambda: _text().replace('"payload"', '"payl\\u006fad": "", "payload"').encode(),
                 id="payload twice, one escaped"),
])
def test_rejects_json_that_parsers_read_differently(data: Callable[[], bytes]) -> None:
    assert code_of(lambda: parse_bundle(data(), "x.sig")) == "SIG_MALFORMED"


@pytest.mark.parametrize("text", ["1.0", "1e5", "NaN", "-Infinity", "9" * 21, '{"a": 1, "a": 1}', "1 2", "\ufeff1", ""])
def test_strict_json_refuses(text: str) -> None:
    with pytest.raises(StrictJsonError):
        parse_strict_json(text.encode())


@pytest.mark.parametrize(("text", "value"), [
    ("-7", -7), ("9" * 20, 99999999999999999999), ('{"é": [null]}', {"é": [None]}),
])
def test_strict_json_reads(text: str, value: object) -> None:
    assert parse_strict_json(text.encode()) == value


def test_deep_value_in_place_of_a_string_is_a_typed_error() -> None:
    data = b'{"mediaType": ' + b"[" * 900 + b"]" * 900 + b', "verificationMaterial": {}, "dsseEnvelope": {}}'

    assert code_of(lambda: parse_bundle(data, "x.sig")) == "SIG_MALFORMED"


@pytest.mark.parametrize("edit", [
    pytest.param(lambda d: d["verificationMaterial"].pop("tlogEntries"), id="no tlogEntries"),
    pytest.param(lambda d: d["dsseEnvelope"]["signatures"][0].pop("keyid"), id="no inner keyid"),
    pytest.param(lambda d: d["dsseEnvelope"]["signatures"][0].update(keyid=None), id="null inner keyid"),
])
def test_reads_bundle_without_optional_fields(edit: Callable[[Document], object]) -> None:
    document = bundle()
    edit(document)

    read = parse_bundle(json.dumps(document).encode(), "x.sig")

    check_signature(read, PUBLIC, "x.sig")
    assert read.hint == KEY.keyid


def test_signed_bytes_count_bytes_in_decimal() -> None:
    assert signed_bytes("application/x", "é!".encode()) == b"DSSEv1 13 application/x 3 \xc3\xa9!"


@pytest.mark.parametrize("signed_as", ["application/vnd.in-toto+json", "application/json"])
def test_rejects_another_payload_type_whatever_was_signed(signed_as: str) -> None:
    signature = KEY.private.sign(signed_bytes(signed_as, b"{}"), ec.ECDSA(hashes.SHA256()))
    read = Bundle(KEY.keyid, "application/json", b"{}", signature)

    assert code_of(lambda: check_signature(read, PUBLIC, "x.sig")) == "STMT_TYPE"


@pytest.mark.parametrize("curve", ["p384", "p521"])
def test_hash_follows_from_the_curve(curve: str) -> None:
    key = toy_key(f"hash {curve}", curve)
    signature = key.private.sign(signed_bytes("application/vnd.in-toto+json", b"{}"), ec.ECDSA(hashes.SHA256()))
    read = Bundle(key.keyid, "application/vnd.in-toto+json", b"{}", signature)

    assert code_of(lambda: check_signature(read, key.private.public_key(), "x.sig")) == "SIG_INVALID"


def serialization(**fields: object) -> Callable[[Document], object]:
    return lambda d: d["predicate"]["serialization"].update(fields)


def resource(**fields: object) -> Callable[[Document], object]:
    return lambda d: d["predicate"]["resources"][0].update(fields)


def list_4097_files(resources: list[Document]) -> None:
    resources[:] = [{"name": f"config/{index}", "algorithm": "sha256", "digest": "1" * 64} for index in range(4097)]


@pytest.mark.parametrize(("edit", "code"), [
    pytest.param(lambda d: d.update(_type="https://in-toto.io/Statement/v0.1"), "STMT_UNSUPPORTED", id="type"),
    pytest.param(lambda d: d.update(predicateType="https://model_signing/Digests/v0.1"), "STMT_UNSUPPORTED",
                 id="old predicate"),
    pytest.param(serialization(method="shards"), "STMT_UNSUPPORTED", id="shards"),
    pytest.param(serialization(hash_type="blake3"), "STMT_UNSUPPORTED", id="blake3"),
    pytest.param(serialization(allow_symlinks=True), "STMT_UNSUPPORTED", id="symlinks"),
    pytest.param(serialization(allow_symlinks=0), "STMT_UNSUPPORTED", id="symlinks 0"),
    pytest.param(lambda d: d["predicate"]["serialization"].pop("allow_symlinks"), "STMT_UNSUPPORTED",
                 id="symlinks unstated"),
    pytest.param(serialization(ignore_paths=["modules"]), "STMT_UNSUPPORTED", id="ignores modules"),
    pytest.param(serialization(ignore_paths=["*"]), "STMT_UNSUPPORTED", id="ignores all"),
    pytest.param(serialization(ignore_paths=["signatures/../modules"]), "STMT_UNSUPPORTED", id="ignores upwards"),
    pytest.param(serialization(ignore_paths=[["signatures"]]), "STMT_UNSUPPORTED", id="ignores a list"),
    pytest.param(serialization(ignore_paths="signatures"), "STMT_MALFORMED", id="ignore_paths is a string"),
    pytest.param(resource(algorithm="sha1"), "STMT_UNSUPPORTED", id="sha1"),
    pytest.param(resource(digest="1" * 63), "STMT_MALFORMED", id="short digest"),
    pytest.param(resource(digest="A" * 64), "STMT_MALFORMED", id="digest in capitals"),
    pytest.param(resource(name=7), "STMT_MALFORMED", id="name is a number"),
    pytest.param(lambda d: d["subject"].append(d["subject"][0]), "STMT_MALFORMED", id="two subjects"),
    pytest.param(lambda d: d.pop("subject"), "STMT_MALFORMED", id="no subject"),
    pytest.param(lambda d: d["predicate"].pop("resources"), "STMT_MALFORMED", id="no resources"),
    pytest.param(with_root(list_4097_files), "STMT_MALFORMED", id="4097 files"),
    pytest.param(lambda d: d.update(predicate=None), "STMT_MALFORMED", id="no predicate"),
    pytest.param(lambda d: d["subject"][0]["digest"].update(sha256="0" * 64), "STMT_ROOT", id="root"),
])
def test_rejects_statement(edit: Callable[[Document], object], code: str) -> None:
    document = statement()
    edit(document)

    assert code_of(lambda: parse_statement(json.dumps(document).encode(), "x.sig")) == code


@pytest.mark.parametrize("payload", [b"", b"null", b"[" * 200_000, b'{"_type": 1, "_type": 1}'],
                         ids=["empty", "null", "200,000 brackets", "repeated field"])
def test_rejects_statement_that_is_not_strict_json(payload: bytes) -> None:
    assert code_of(lambda: parse_statement(payload, "x.sig")) == "STMT_MALFORMED"


@pytest.mark.parametrize("edit", [
    pytest.param(with_root(lambda resources: resources.reverse()), id="another order"),
    pytest.param(lambda d: d.update(extra=1), id="another field"),
    pytest.param(lambda d: d["predicate"].update(extra=1), id="another field of the predicate"),
    pytest.param(serialization(ignore_paths=["signatures/name.sig"]), id="ignores one signature"),
    pytest.param(lambda d: d["predicate"]["serialization"].pop("ignore_paths"), id="ignores nothing"),
])
def test_reads_statement_as_others_write_it(edit: Callable[[Document], object]) -> None:
    document = statement()
    edit(document)

    read = parse_statement(json.dumps(document).encode(), "x.sig")

    assert read.digests == {"config/a": "1" * 64, "manifest.pb": "2" * 64}


def test_statement_is_written_with_sorted_keys_and_files_by_path_component() -> None:
    data = encode_statement("toy", {"manifest.pb": "22" * 32, "a-b/x": "33" * 32, "a/x": "11" * 32})

    assert data == (
        b'{"_type":"https://in-toto.io/Statement/v1","predicate":{"resources":['
        b'{"algorithm":"sha256","digest":"%s","name":"a/x"},{"algorithm":"sha256","digest":"%s","name":"a-b/x"},'
        b'{"algorithm":"sha256","digest":"%s","name":"manifest.pb"}],"serialization":{"allow_symlinks":false,'
        b'"hash_type":"sha256","ignore_paths":[".git",".gitattributes",".github",".gitignore","signatures"],'
        b'"method":"files"}},"predicateType":"https://model_signing/signature/v1.0","subject":[{"digest":{"sha256":'
        b'"5e59d593443469f47babd1047b73a59965ea4dcd3ae93b8ec4ca0d02fa753b72"},"name":"toy"}]}'
    ) % (b"11" * 32, b"33" * 32, b"22" * 32)


def test_bundle_survives_writing_and_reading() -> None:
    written = Bundle(KEY.keyid, "application/vnd.in-toto+json", b"payload", b"signature")

    data = encode_bundle(written)

    assert parse_bundle(data, "x.sig") == written
    assert json.loads(data)["dsseEnvelope"]["payload"] == base64.b64encode(b"payload").decode()


@pytest.mark.parametrize("name", ["a", "0", "manifest.pb", "weights/3f.bin", "a/b/c", "a_-.b", "a" * 160])
def test_accepts_name(name: str) -> None:
    assert is_name(name)
