"""Rules that a team sets for its cores, beyond who signed them: precision, kernels, canary.

    policy = read_policy(Path("policy.toml"))
    for finding in check_policy(core, policy):
        print(finding.rule, finding.met)

A policy is TOML or JSON with `format = "dflash-policy/1"` and any of the rules below. It is asked about verified cores
only: the trust file says whether a core is authentic, a policy whether it is what the team wants to serve.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dflash_core.effective import effective_draft_body, effective_draft_head, effective_scope
from dflash_core.errors import PolicyError
from dflash_core.v1.graph_pb2 import CPU_REGISTRY

from .bundle import StrictJsonError, is_sha256, parse_strict_json
from .verify import VerifiedCore

FORMAT = "dflash-policy/1"
CANARY_FORMAT = "dflash-canary/1"
"""What `runtime.canary` writes and replays; that module needs numpy, a policy does not."""
MAX_POLICY_BYTES = 1 << 20
PRECISIONS: Final = ("nvfp4", "mxfp8", "checkpoint")
"""From the coarsest to the finest."""
SCOPES: Final = ("none", "kda-input", "kda-input=qkv", "all")


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy, read and checked. None, or an empty tuple, is a rule that was not set.

    Attributes:
        signers: key ids that must all have signed.
        kernel_sources: SHA-256 (hex) of kernel sources; every compiled module must come from one of them.
        registries: CPU op registries that modules may name.
        draft_head_at_least, draft_body_at_least: coarsest precision accepted, one of `PRECISIONS`.
        online_scope: the scope that the target's online conversion must have, one of `SCOPES`.
        canary: whether the core must carry a recorded acceptance canary.
    """

    signers: tuple[str, ...] = ()
    kernel_sources: tuple[str, ...] = ()
    registries: tuple[str, ...] = ()
    draft_head_at_least: str | None = None
    draft_body_at_least: str | None = None
    online_scope: str | None = None
    canary: bool | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule, what it asks for, and what the core has."""

    rule: str
    expected: str
    found: str
    met: bool


def read_policy(path: Path) -> Policy:
    """Read a policy file: JSON if its name ends in `.json`, else TOML.

    Raises:
        PolicyError: POLICY_MISSING, or POLICY_MALFORMED for an unknown rule or value.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_POLICY_BYTES + 1)
    except OSError as err:
        raise PolicyError("POLICY_MISSING", f"cannot open the policy: {err.strerror}", where=str(path)) from err
    try:
        if len(data) > MAX_POLICY_BYTES:
            raise ValueError(f"larger than {MAX_POLICY_BYTES} bytes")
        document = parse_strict_json(data) if path.suffix == ".json" else tomllib.loads(data.decode("utf-8"))
    except (StrictJsonError, ValueError, RecursionError) as err:
        raise PolicyError("POLICY_MALFORMED", f"the policy cannot be read: {err}", where=str(path)) from err
    return parse_policy(document, str(path))


def parse_policy(document: object, where: str) -> Policy:
    """The policy that a parsed file states; raises POLICY_MALFORMED."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PolicyError("POLICY_MALFORMED", "not a policy", where=where, expected=f'format = "{FORMAT}"')
    rules: dict[str, Any] = {name: value for name, value in document.items() if name != "format"}
    for name, value in rules.items():
        check = _VALUES.get(name)
        if check is None:
            raise PolicyError("POLICY_MALFORMED", "unknown rule", where=f"{ascii(name)[1:-1][:80]} in {where}",
                              expected=", ".join(_VALUES))
        if not check(value):
            raise PolicyError("POLICY_MALFORMED", "a rule has a value that it cannot have", where=f"{name} in {where}",
                              expected=_EXPECTED[name], got=ascii(value)[:200])
        rules[name] = tuple(value) if isinstance(value, list) else value
    return Policy(**rules)


def check_policy(core: VerifiedCore, policy: Policy) -> tuple[Finding, ...]:
    """Hold a verified core against every rule that the policy sets, in the order of `Policy`."""
    manifest = core.manifest
    found: list[Finding] = []
    if policy.signers:
        signed = {signer.keyid for signer in core.signers}
        found += [Finding("signers", f"signed by {name}", "signed" if name in signed else "no signature that counts",
                          name in signed) for name in policy.signers]
    compiled = [module for module in manifest.modules if module.kind != CPU_REGISTRY]
    if policy.kernel_sources:
        found += [_member("kernel_sources", f"module {module.module_id}, {module.target}", module.source_sha256.hex(),
                          policy.kernel_sources) for module in compiled]
    if policy.registries:
        found += [_member("registries", f"module {module.module_id}", module.registry, policy.registries)
                  for module in manifest.modules if module.kind == CPU_REGISTRY]
    if policy.draft_head_at_least is not None:
        found.append(_at_least("draft_head_at_least", policy.draft_head_at_least, effective_draft_head(manifest)))
    if policy.draft_body_at_least is not None:
        found.append(_at_least("draft_body_at_least", policy.draft_body_at_least, effective_draft_body(manifest)))
    if policy.online_scope is not None:
        scope = effective_scope(manifest)
        text = scope if isinstance(scope, str) else "none"
        found.append(Finding("online_scope", policy.online_scope, text, text == policy.online_scope))
    if policy.canary is not None:
        present = _has_canary(core)
        found.append(Finding("canary", _presence(policy.canary), _presence(present), present or not policy.canary))
    return tuple(found)


def _has_canary(core: VerifiedCore) -> bool:
    """Whether a golden file is a canary; a recording of inputs and outputs is none."""
    for entry in core.manifest.files:
        if entry.role == "golden" and entry.path.endswith(".json"):
            try:
                document = json.loads(core.small_file(entry.ref))
            except (ValueError, RecursionError):
                continue
            if isinstance(document, dict) and document.get("format") == CANARY_FORMAT:
                return True
    return False


def _member(rule: str, what: str, value: str, known: tuple[str, ...]) -> Finding:
    return Finding(rule, f"{what}: one of {len(known)} known", value or "not recorded", value in known)


def _at_least(rule: str, least: str, value: object) -> Finding:
    if not isinstance(value, str):
        return Finding(rule, f"{least} or finer", "no draft", True)
    return Finding(rule, f"{least} or finer", value,
                   value in PRECISIONS and PRECISIONS.index(value) >= PRECISIONS.index(least))


def _presence(present: bool) -> str:
    return "present" if present else "absent"


def _is_digests(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(is_sha256(item) for item in value)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(item, str) and item for item in value)


_VALUES: Mapping[str, Callable[[object], bool]] = {
    "signers": _is_digests,
    "kernel_sources": _is_digests,
    "registries": _is_names,
    "draft_head_at_least": lambda value: value in PRECISIONS,
    "draft_body_at_least": lambda value: value in PRECISIONS,
    "online_scope": lambda value: value in SCOPES,
    "canary": lambda value: isinstance(value, bool),
}
_EXPECTED: Mapping[str, str] = {
    "signers": "a list of key ids",
    "kernel_sources": "a list of SHA-256 digests in lower-case hex",
    "registries": "a list of names",
    "draft_head_at_least": " or ".join(PRECISIONS),
    "draft_body_at_least": " or ".join(PRECISIONS),
    "online_scope": " or ".join(SCOPES),
    "canary": "true or false",
}
