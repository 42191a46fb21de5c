"""dflash-run's commands about trust: sign, verify of several cores, pack, unpack, policy check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from runtime.cli import app
from runtime.console import human_bytes
from tests.toy_core import ToyCore, make_toy_core, toy_key, trust_document, write_trust

PARTNER = toy_key("partner")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def document(result: Result) -> dict[str, Any]:
    return json.loads(result.stdout)


@pytest.fixture
def toy(tmp_path: Path) -> ToyCore:
    return make_toy_core(tmp_path / "core")


@pytest.fixture
def trust(tmp_path: Path) -> Path:
    return write_trust(tmp_path / "trust.json", trust_document())


@pytest.fixture
def partner_key(tmp_path: Path) -> Path:
    path = tmp_path / "partner.pem"
    path.write_bytes(PARTNER.private_pem())
    path.chmod(0o600)
    return path


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_sign_adds_a_second_signer_and_changes_no_other_byte(
    toy: ToyCore, tmp_path: Path, partner_key: Path
) -> None:
    both = write_trust(tmp_path / "both.json", trust_document(toy_key(), PARTNER, threshold=2))
    before = tree(toy.path)
    assert run("verify", toy.path, "--trust", both).exit_code == 4

    result = run("sign", toy.path, "--key", partner_key)

    assert result.exit_code == 0
    assert result.stdout == f"signed      {toy.path}/signatures/{PARTNER.keyid}.sig\n"
    after = tree(toy.path)
    assert after.keys() - before.keys() == {f"signatures/{PARTNER.keyid}.sig"}
    assert {name: after[name] for name in before} == before
    assert run("verify", toy.path, "--trust", both).exit_code == 0


def test_sign_says_in_json_what_it_wrote(toy: ToyCore, partner_key: Path) -> None:
    assert document(run("sign", toy.path, "--key", partner_key, "--json")) == {
        "signature": f"{toy.path}/signatures/{PARTNER.keyid}.sig", "keyid": PARTNER.keyid,
    }


def test_sign_refuses_a_core_that_would_not_load(toy: ToyCore, partner_key: Path) -> None:
    (toy.path / toy.config).write_bytes(b"{}")

    result = run("sign", toy.path, "--key", partner_key, "--json")

    assert (result.exit_code, document(result)["error"]["code"]) == (4, "FILE_SIZE")
    assert not toy.signature(PARTNER).exists()


def test_verify_gives_one_line_for_each_of_several_cores(toy: ToyCore, tmp_path: Path, trust: Path) -> None:
    other = make_toy_core(tmp_path / "other", release=2)
    bad = make_toy_core(tmp_path / "bad")
    (bad.path / bad.config).write_bytes(b"{}")

    result = run("verify", toy.path, bad.path, other.path, "--trust", trust)

    lines = result.stdout.splitlines()
    assert result.exit_code == 4
    assert lines[0].startswith("authentic   toy   release 1   ") and lines[0].endswith(str(toy.path))
    assert lines[1] == f"refused     FILE_SIZE   {bad.path}"
    assert lines[2].startswith("authentic   toy   release 2   ")
    assert "error: a file has another size than the manifest states" in result.stderr


def test_verify_gives_one_document_for_several_cores(toy: ToyCore, tmp_path: Path, trust: Path) -> None:
    result = run("verify", toy.path, tmp_path / "absent", "--trust", trust, "--json", "--full")

    found = document(result)["cores"]
    assert result.exit_code == 4
    assert (found[0]["core_name"], found[0]["full"]) == ("toy", True)
    assert (found[1]["core"], found[1]["error"]["code"]) == (str(tmp_path / "absent"), "FILE_MISSING")


def test_verify_compares_requirements_with_a_device(toy: ToyCore, trust: Path) -> None:
    result = run("verify", toy.path, "--trust", trust, "--device", "cpu")

    assert result.exit_code == 0
    assert "met         device target: expected cpu, found cpu" in result.stdout
    assert "met         memory: expected at least " in result.stdout


def test_verify_says_which_requirement_is_not_met(toy: ToyCore, trust: Path) -> None:
    toy.edit_manifest(lambda manifest: setattr(manifest.buffers[3], "fixed_bytes", 1 << 50))

    text = run("verify", toy.path, "--trust", trust, "--device", "cpu")
    result = run("verify", toy.path, "--trust", trust, "--device", "cpu", "--json")

    found = {item["name"]: item for item in document(result)["requirements"]}
    assert (text.exit_code, result.exit_code) == (5, 5)
    assert found["memory"]["met"] is False
    assert found["device target"] == {"name": "device target", "expected": "cpu", "found": "cpu", "met": True}
    assert "NOT MET     memory" in text.stdout


def test_verify_says_that_a_core_is_for_another_device(toy: ToyCore, trust: Path) -> None:
    toy.edit_manifest(lambda manifest: setattr(manifest.device_targets[0], "name", "sm_100a"))

    result = run("verify", toy.path, "--trust", trust, "--device", "cpu", "--json")

    assert result.exit_code == 5
    assert document(result)["requirements"] == [
        {"name": "device target", "expected": "sm_100a", "found": "cpu", "met": False}]


def test_summary_is_for_a_person(toy: ToyCore, trust: Path) -> None:
    toy.edit_manifest(lambda manifest: setattr(manifest.speculation, "method", "dflash2"))

    lines = run("verify", toy.path, "--trust", trust).stdout.splitlines()

    assert "models      toy/toy" in lines
    assert ("precision   target inputs checkpoint, draft body no draft, proposal head no draft, "
            "verification head checkpoint") in lines


def test_packs_verifies_and_unpacks(toy: ToyCore, tmp_path: Path, trust: Path) -> None:
    archive = tmp_path / "core.zip"

    packed = run("pack", toy.path, archive)
    verified = run("verify", archive, "--trust", trust, "--full")
    unpacked = run("unpack", archive, tmp_path / "again", "--trust", trust)

    assert [packed.exit_code, verified.exit_code, unpacked.exit_code] == [0, 0, 0]
    assert packed.stdout == f"packed      {archive}   {human_bytes(archive.stat().st_size)}\n"
    assert unpacked.stdout.startswith(f"unpacked    {tmp_path / 'again'}   ")
    assert tree(tmp_path / "again") == tree(toy.path)


def test_pack_and_unpack_speak_json(toy: ToyCore, tmp_path: Path, trust: Path) -> None:
    archive = tmp_path / "core.zip"

    packed = document(run("pack", toy.path, archive, "--json"))
    unpacked = document(run("unpack", archive, tmp_path / "again", "--trust", trust, "--json"))
    again = run("pack", toy.path, archive, "--json")

    assert packed == {"archive": str(archive), "nbytes": archive.stat().st_size}
    assert unpacked["core"] == str(tmp_path / "again") and len(unpacked["core_digest"]) == 64
    assert (again.exit_code, document(again)["error"]["code"]) == (2, "OUTPUT_EXISTS")


@pytest.mark.parametrize(("rules", "exit_code", "line"), [
    (f'signers = ["{toy_key().keyid}"]', 0, f"met         signers: expected signed by {toy_key().keyid}, found signed"),
    ("canary = true", 7, "NOT MET     canary: expected present, found absent"),
], ids=["met", "not met"])
def test_policy_check_says_which_rule_is_not_met(
    toy: ToyCore, tmp_path: Path, trust: Path, rules: str, exit_code: int, line: str
) -> None:
    (tmp_path / "policy.toml").write_text(f'format = "dflash-policy/1"\n{rules}\n')

    text = run("policy", "check", toy.path, "--policy", tmp_path / "policy.toml", "--trust", trust)
    result = run("policy", "check", toy.path, "--policy", tmp_path / "policy.toml", "--trust", trust, "--json")

    assert (text.exit_code, result.exit_code) == (exit_code, exit_code)
    assert text.stdout.splitlines() == [line]
    assert document(result)["passed"] is (exit_code == 0)
    assert document(result)["findings"][0]["met"] is (exit_code == 0)


def test_policy_check_asks_the_trust_file_first(toy: ToyCore, tmp_path: Path) -> None:
    stranger = write_trust(tmp_path / "stranger.json", trust_document(PARTNER))
    (tmp_path / "policy.toml").write_text('format = "dflash-policy/1"\n')

    result = run("policy", "check", toy.path, "--policy", tmp_path / "policy.toml", "--trust", stranger, "--json")

    assert (result.exit_code, document(result)["error"]["code"]) == (4, "ROLE_UNMET")
