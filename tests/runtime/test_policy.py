"""The rules of a team: what a policy may say, and what each rule finds in a core."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_core.errors import PolicyError
from dflash_core.v1.manifest_pb2 import RebuildManifest

from runtime.canary import FORMAT as CANARY_FORMAT
from runtime.policy import CANARY_FORMAT as POLICY_CANARY_FORMAT
from runtime.policy import Finding, Policy, check_policy, parse_policy, read_policy
from runtime.trust import TrustPolicy
from runtime.verify import VerifiedCore, verify
from tests.edit_core import add_file
from tests.runtime.test_kernel_image import cubin
from tests.toy_core import ToyCore, make_toy_core, toy_key, trust_document

CANARY = b'{"format": "dflash-canary/1"}'
SOURCE = hashlib.sha256(b"kernel source").hexdigest()


@pytest.fixture
def toy(tmp_path: Path) -> ToyCore:
    return make_toy_core(tmp_path / "core")


def add_cubin(toy: ToyCore, manifest: RebuildManifest, source: bytes) -> None:
    data = cubin()
    name = f"modules/{hashlib.sha256(data).hexdigest()}.cubin"
    module = manifest.modules.add(module_id=1, kind=1, target="sm_90a", source_sha256=source)
    module.file.CopyFrom(add_file(toy, manifest, "module", name, data))


def speculate(manifest: RebuildManifest, **fields: str) -> None:
    manifest.speculation.method, manifest.speculation.draft_depth = "dflash2", 7
    for name, value in fields.items():
        setattr(manifest.speculation, name, value)


def verified(toy: ToyCore, edit: Callable[[RebuildManifest], object]) -> VerifiedCore:
    toy.edit_manifest(edit)
    trust = TrustPolicy.parse(json.dumps(trust_document()).encode(), "trust.json")
    return verify(toy.path, trust)


def scope(value: str) -> Callable[[ToyCore, RebuildManifest], None]:
    def edit(toy: ToyCore, manifest: RebuildManifest) -> None:
        manifest.online_quantization, manifest.online_mxfp8_scope = "mxfp8", value
    return edit


Edit = Callable[[ToyCore, RebuildManifest], object]

ROWS: list[tuple[str, Edit, Policy, list[tuple[str, str, bool]]]] = [
    ("no rule", lambda t, m: None, Policy(), []),
    ("the signer", lambda t, m: None, Policy(signers=(toy_key().keyid,)), [("signers", "signed", True)]),
    ("another signer", lambda t, m: None, Policy(signers=("00" * 32,)),
     [("signers", "no signature that counts", False)]),
    ("a known source", lambda t, m: add_cubin(t, m, bytes.fromhex(SOURCE)), Policy(kernel_sources=(SOURCE,)),
     [("kernel_sources", SOURCE, True)]),
    ("an unknown source", lambda t, m: add_cubin(t, m, bytes(32)), Policy(kernel_sources=(SOURCE,)),
     [("kernel_sources", "00" * 32, False)]),
    ("no recorded source", lambda t, m: add_cubin(t, m, b""), Policy(kernel_sources=(SOURCE,)),
     [("kernel_sources", "not recorded", False)]),
    ("sources of a CPU core", lambda t, m: None, Policy(kernel_sources=(SOURCE,)), []),
    ("a known registry", lambda t, m: None, Policy(registries=("dflash.cpu",)), [("registries", "dflash.cpu", True)]),
    ("an unknown registry", lambda t, m: None, Policy(registries=("other",)), [("registries", "dflash.cpu", False)]),
    ("a head of nvfp4", lambda t, m: speculate(m, draft_head_quantization="nvfp4"),
     Policy(draft_head_at_least="mxfp8"), [("draft_head_at_least", "nvfp4", False)]),
    ("a head of mxfp8", lambda t, m: speculate(m, draft_head_quantization="mxfp8"),
     Policy(draft_head_at_least="mxfp8"), [("draft_head_at_least", "mxfp8", True)]),
    ("a head as published", lambda t, m: speculate(m), Policy(draft_head_at_least="mxfp8"),
     [("draft_head_at_least", "checkpoint", True)]),
    ("a head of an unknown format", lambda t, m: speculate(m, draft_head_quantization="fp2"),
     Policy(draft_head_at_least="nvfp4"), [("draft_head_at_least", "fp2", False)]),
    ("a body of mxfp8", lambda t, m: speculate(m, draft_body_quantization="mxfp8"),
     Policy(draft_body_at_least="checkpoint"), [("draft_body_at_least", "mxfp8", False)]),
    ("no draft", lambda t, m: None, Policy(draft_head_at_least="checkpoint"),
     [("draft_head_at_least", "no draft", True)]),
    ("the scope", scope("kda-input"), Policy(online_scope="kda-input"), [("online_scope", "kda-input", True)]),
    ("another scope", scope("all"), Policy(online_scope="kda-input"), [("online_scope", "all", False)]),
    ("no online conversion", lambda t, m: None, Policy(online_scope="none"), [("online_scope", "none", True)]),
    ("a canary", lambda t, m: add_file(t, m, "golden", "golden/c.json", CANARY), Policy(canary=True),
     [("canary", "present", True)]),
    ("a recording in place of a canary", lambda t, m: add_file(t, m, "golden", "golden/c.pb", CANARY),
     Policy(canary=True), [("canary", "absent", False)]),
    *((f"a golden file of {data[:16]!r}", lambda t, m, data=data: add_file(t, m, "golden", "golden/c.json", data),
       Policy(canary=True), [("canary", "absent", False)])
      for data in (b"", b"[]", b'{"format": "dflash-canary/9"}', b"[" * 100_000, b"\xff")),
    ("no canary", lambda t, m: None, Policy(canary=True), [("canary", "absent", False)]),
    ("a canary that is not needed", lambda t, m: None, Policy(canary=False), [("canary", "absent", True)]),
]


@pytest.mark.parametrize(("edit", "policy", "expected"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_rule_finds(toy: ToyCore, edit: Edit, policy: Policy, expected: list[tuple[str, str, bool]]) -> None:
    with verified(toy, lambda manifest: edit(toy, manifest)) as core:
        found = check_policy(core, policy)

    assert [(finding.rule, finding.found, finding.met) for finding in found] == expected


def test_canary_is_what_the_canary_module_writes() -> None:
    assert POLICY_CANARY_FORMAT == CANARY_FORMAT


def test_finding_says_what_is_expected(toy: ToyCore) -> None:
    with verified(toy, lambda manifest: speculate(manifest, draft_head_quantization="nvfp4")) as core:
        assert check_policy(core, Policy(draft_head_at_least="mxfp8")) == (
            Finding("draft_head_at_least", "mxfp8 or finer", "nvfp4", False),
        )


TOML = f'''format = "dflash-policy/1"
signers = ["{toy_key().keyid}"]
kernel_sources = ["{SOURCE}"]
registries = ["dflash.cpu"]
draft_head_at_least = "mxfp8"
draft_body_at_least = "mxfp8"
online_scope = "kda-input"
canary = true
'''
READ = Policy((toy_key().keyid,), (SOURCE,), ("dflash.cpu",), "mxfp8", "mxfp8", "kda-input", True)


def test_reads_toml_and_json(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(TOML)
    (tmp_path / "policy.json").write_text(json.dumps({
        "format": "dflash-policy/1", "signers": [toy_key().keyid], "kernel_sources": [SOURCE],
        "registries": ["dflash.cpu"], "draft_head_at_least": "mxfp8", "draft_body_at_least": "mxfp8",
        "online_scope": "kda-input", "canary": True,
    }))

    assert read_policy(tmp_path / "policy.toml") == READ
    assert read_policy(tmp_path / "policy.json") == READ


@pytest.mark.parametrize("rules", [
    pytest.param(None, id="null"),
    pytest.param({}, id="no format"),
    pytest.param({"format": "dflash-policy/2"}, id="another format"),
    pytest.param({"format": "dflash-policy/1", "cannary": True}, id="unknown rule"),
    pytest.param({"format": "dflash-policy/1", "canary": "yes"}, id="canary is a word"),
    pytest.param({"format": "dflash-policy/1", "canary": 1}, id="canary is a number"),
    pytest.param({"format": "dflash-policy/1", "signers": []}, id="no signers"),
    pytest.param({"format": "dflash-policy/1", "signers": ["release team"]}, id="signer is no key id"),
    pytest.param({"format": "dflash-policy/1", "kernel_sources": SOURCE}, id="sources is a string"),
    pytest.param({"format": "dflash-policy/1", "registries": [""]}, id="registry without a name"),
    pytest.param({"format": "dflash-policy/1", "draft_head_at_least": "bf16"}, id="unknown precision"),
    pytest.param({"format": "dflash-policy/1", "draft_body_at_least": ["mxfp8"]}, id="precision is a list"),
    pytest.param({"format": "dflash-policy/1", "online_scope": "everything"}, id="unknown scope"),
])
def test_rejects_policy(rules: Any) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy(rules, "policy.toml")

    assert caught.value.code == "POLICY_MALFORMED"
    assert caught.value.expected


@pytest.mark.parametrize(("name", "data"), [
    ("p.toml", b"format = "), ("p.toml", b"\xff"), ("p.json", b"{"), ("p.json", b'{"a": 1, "a": 1}'),
    ("p.toml", b"#" * ((1 << 20) + 1)), ("p.toml", b"a = " + b"[" * 100_000),
], ids=["cut off TOML", "no UTF-8", "cut off JSON", "a rule twice", "above 1 MiB", "100,000 brackets"])
def test_rejects_file_that_is_no_policy(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)

    with pytest.raises(PolicyError) as caught:
        read_policy(tmp_path / name)

    assert caught.value.code == "POLICY_MALFORMED"


def test_names_the_policy_that_is_absent(tmp_path: Path) -> None:
    with pytest.raises(PolicyError) as caught:
        read_policy(tmp_path / "absent.toml")

    assert caught.value.code == "POLICY_MISSING"


