"""A result file: settings, samples, summaries and, beside it, a signature over its exact bytes.

    write_result(document, Path("result.json"), key=None)
    verify_result(Path("result.json"), trust)      # recomputes, checks invariants, checks the signature if there is one
"""

from __future__ import annotations

import base64
import json
import platform
import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from dflash_core.errors import QualityError, ResourceError, UsageError, VerificationError

from runtime.bench.measure import ColdPrefill, Measured
from runtime.bench.prompts import PromptSet
from runtime.bench.summary import summarize
from runtime.bundle import StrictJsonError, decode_strict_base64, parse_strict_json, signed_bytes
from runtime.core import Core
from runtime.driver import DeviceAttribute
from runtime.gpu.device import is_gpu, open_device
from runtime.keys import PrivateKey, keyid, signature_hash
from runtime.serve.core_view import CoreFacts, precision_document
from runtime.trust import Signer, TrustPolicy

FORMAT = "dflash-bench/1"
PAYLOAD_TYPE = "application/vnd.dflash.bench+json"
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What a run was asked to do."""

    device: str
    max_tokens: int
    seed: int
    warmup_requests: int
    speculation: bool


def result_document(core: Core, facts: CoreFacts, prompts: PromptSet, settings: BenchSettings,
                    measured: list[Measured], prefills: tuple[ColdPrefill, ...],
                    startup_s: dict[str, float]) -> dict[str, Any]:
    """The whole result, as `--json` prints it and `--out` writes it."""
    manifest = core.manifest
    scenarios = []
    for item in measured:
        raw: dict[str, Any] = {"scenario": item.scenario, "max_concurrency": item.concurrency,
                               "num_prompts": len(item.requests), "duration": item.duration_s,
                               "steps": [asdict(s) for s in item.steps], "requests": [asdict(r) for r in item.requests]}
        scenarios.append({**raw, **summarize(raw)})
    carried = {source.path: source.sha256.hex() for source in manifest.target.files}
    return {
        "format": FORMAT, "date": datetime.now(UTC).isoformat(timespec="seconds"), "model_id": manifest.core_name,
        "scenarios": scenarios,
        "prefill": [asdict(sample) for sample in prefills], "startup_s": startup_s,
        "dflash": {
            "core_digest": core.core_digest, "release": manifest.release,
            "signers": [{"keyid": s.keyid, "owner": s.owner} for s in facts.signers],
            "precision": precision_document(manifest), "settings": asdict(settings),
            "prompt_set": {"source": prompts.source, "count": len(prompts.prompts), "sha256": prompts.digest},
            "template_sha256": carried.get("chat_template.jinja") or carried.get("tokenizer_config.json"),
            "kernels": sorted({kernel.name for kernel in manifest.kernels}),
            "device": device_document(settings.device)}}


def device_document(name: str) -> dict[str, Any]:
    """What the run was made on; a CPU's clock as the system states it at this moment, a GPU's highest."""
    model, mhz = platform.processor(), None
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields = [line.partition(":") for line in info.read_text().splitlines()]
        found = {key.strip(): value.strip() for key, _, value in reversed(fields)}
        model, mhz = found.get("model name", model), found.get("cpu MHz")
    return {"name": name, "cpu": model, "cpu_mhz": None if mhz is None else float(mhz), "machine": platform.machine(),
            "system": f"{platform.system()} {platform.release()}", "python": platform.python_version(),
            "gpu": _gpu_document(name) if is_gpu(name) else None}


def _gpu_document(name: str) -> dict[str, Any]:
    device = open_device(name)
    try:
        driver, handle, facts = device.driver, device.handle, device.facts
        version = driver.version()
        return {"model": driver.device_name(handle), "architecture": facts.name, "sm_count": facts.sm_count,
                "cuda": f"{version // 1000}.{version % 1000 // 10}", "driver": _kernel_driver(),
                "max_sm_mhz": driver.device_attribute(handle, DeviceAttribute.CLOCK_RATE) / 1e3,
                "max_memory_mhz": driver.device_attribute(handle, DeviceAttribute.MEMORY_CLOCK_RATE) / 1e3}
    finally:
        device.close()


def _kernel_driver(version: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The kernel module's version ("580.95.05"); None where the system does not say."""
    if not version.exists():
        return None
    found = re.search(r"Kernel Module\s.*?(\d+(?:\.\d+)+)", version.read_text("utf-8", "replace"))
    return None if found is None else found[1]


def check_result(document: dict[str, Any], where: str) -> None:
    """Recompute every summary from the samples, and check what must hold of each.

    Raises:
        QualityError: RESULT_SUMMARY, a summary is not that of its samples; RESULT_INVARIANT, the samples contradict
            each other.
        UsageError: RESULT; it is not a result file.
    """
    try:
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']!r}")
        for scenario in document["scenarios"]:
            place = f"{where}, scenario {scenario['scenario']}"
            for name, value in summarize(scenario).items():
                _compare(value, scenario[name], f"{place}, {name}")
            _check_invariants(scenario, place)
        for sample in document["prefill"]:
            if sample["computed_tokens"] != sample["input_tokens"] or sample["cached_tokens"] != 0:
                raise QualityError("RESULT_INVARIANT", "a prefill was not cold", where=where,
                                   expected=sample["input_tokens"], got=sample["computed_tokens"])
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as e:
        raise UsageError("RESULT", "not a bench result", where=where, expected=FORMAT,
                         got=f"{type(e).__name__}: {e}") from e


def _check_invariants(scenario: dict[str, Any], where: str) -> None:
    own = scenario["dflash"]
    if own["steps"]:
        product = own["decode_tok_s"] * own["ms_per_step"] / 1e3
        _require(abs(product - own["tokens_per_step"]) <= TOLERANCE * own["tokens_per_step"], where,
                 "decode_tok_s × ms_per_step / 1000 = tokens_per_step", f"{product} and {own['tokens_per_step']}")
        _require(own["tokens_per_step"] >= own["mean_live_seqs"] - TOLERANCE, where,
                 "tokens_per_step ≥ mean_live_seqs", f"{own['tokens_per_step']} < {own['mean_live_seqs']}")
    length = scenario.get("spec_decode_acceptance_length", 1.0)
    _require(length >= 1, where, "acceptance length ≥ 1", str(length))
    for request in scenario["requests"]:
        _require(all(0 <= a <= p for a, p in zip(request["accepted"], request["proposed"], strict=True)), where,
                 "0 ≤ accepted ≤ proposed", str(request["accepted"]))


def _require(holds: bool, where: str, rule: str, got: str) -> None:
    if not holds:
        raise QualityError("RESULT_INVARIANT", "the samples contradict each other", where=where, expected=rule, got=got)


def _compare(expected: Any, got: Any, where: str) -> None:
    if isinstance(expected, dict):
        for name in expected.keys() | got.keys():
            _compare(expected.get(name), got.get(name), f"{where}.{name}")
    elif expected != got:
        raise QualityError("RESULT_SUMMARY", "a summary is not that of its samples", where=where, expected=expected,
                           got=got, hint="do not trust the file; run the bench again")


def write_result(document: dict[str, Any], path: Path, key: PrivateKey | None) -> None:
    """Write a result, and its signature as PATH.sig when there is a key. Raises ResourceError: RESULT_UNWRITABLE."""
    data = (json.dumps(document, indent=1) + "\n").encode()
    try:
        path.write_bytes(data)
        if key is not None:
            public = key.public_key()
            signature = key.sign(signed_bytes(PAYLOAD_TYPE, data), ec.ECDSA(signature_hash(public)))
            envelope = {"payload_type": PAYLOAD_TYPE, "keyid": keyid(public),
                        "signature": base64.b64encode(signature).decode()}
            signature_path(path).write_text(json.dumps(envelope) + "\n")
    except OSError as e:
        raise ResourceError("RESULT_UNWRITABLE", f"cannot write the result: {e.strerror}", where=str(path)) from e


def signature_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sig")


def verify_result(path: Path, trust: TrustPolicy | None) -> tuple[dict[str, Any], tuple[Signer, ...]]:
    """Check a result file: its signature, then every summary and invariant.

    Args:
        trust: whose signatures count; None: an unsigned result is enough.
    Raises:
        VerificationError: RESULT_UNSIGNED, SIG_INVALID, KEY_UNKNOWN, ROLE_UNMET or KEY_REVOKED.
        QualityError, UsageError: as `check_result`.
    """
    try:
        data = path.read_bytes()
    except OSError as e:
        raise UsageError("RESULT", f"cannot read the result: {e.strerror}", where=str(path)) from e
    signers = _check_signature(data, path, trust) if trust is not None else ()
    try:
        document = json.loads(data)
    except ValueError as e:
        raise UsageError("RESULT", "not a bench result", where=str(path), expected=FORMAT, got=str(e)) from e
    if not isinstance(document, dict):
        raise UsageError("RESULT", "not a bench result", where=str(path), expected=FORMAT)
    check_result(document, str(path))
    return document, signers


def _check_signature(data: bytes, path: Path, trust: TrustPolicy) -> tuple[Signer, ...]:
    where = str(signature_path(path))
    try:
        envelope = parse_strict_json(signature_path(path).read_bytes())
        name, text = envelope["keyid"], envelope["signature"]
        signature = decode_strict_base64(text)
        if envelope["payload_type"] != PAYLOAD_TYPE:
            raise ValueError(f"payload type {envelope['payload_type']!r}")
    except FileNotFoundError as e:
        raise VerificationError("RESULT_UNSIGNED", "the result is not signed", where=where,
                                hint="sign it as it is made, with bench --sign KEY, or leave out --trust") from e
    except (OSError, StrictJsonError, KeyError, TypeError, ValueError) as e:
        raise VerificationError("SIG_INVALID", "the signature file is malformed", where=where, got=str(e)) from e
    key = trust.keys.get(name)
    if key is None:
        raise VerificationError("KEY_UNKNOWN", "the result is signed with a key that the trust file does not name",
                                where=where, got=ascii(name)[:80])
    try:
        key.public_key.verify(signature, signed_bytes(PAYLOAD_TYPE, data), ec.ECDSA(signature_hash(key.public_key)))
    except InvalidSignature as e:
        raise VerificationError("SIG_INVALID", "the signature does not verify under the key that it names",
                                where=where, expected=f"a signature by {name}") from e
    return trust.accept(frozenset({name}))
