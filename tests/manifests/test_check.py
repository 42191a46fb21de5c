"""CI for people who keep cores, recipes and pins in a repository: the action's own steps on a repository made here."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.attacks.tiny_core import CONFIG, WEIGHTS, make_tiny_core
from tests.toy_core import toy_key, trust_document, write_trust

ROOT = Path(__file__).resolve().parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}
RECIPE = "manifests/recipes/llama.txtpb"
PIN = "manifests/pins/model.json"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the action's install step installs, in a folder of its own; dependencies are those of the tests."""
    target = tmp_path_factory.mktemp("installed")
    env = environment() | {"ACTION": str(ROOT), "PIP_TARGET": str(target), "PIP_NO_DEPS": "1",
                           "PIP_NO_BUILD_ISOLATION": "0"}  # 0 switches the isolation off
    subprocess.run(["bash", "-euo", "pipefail", "-c", STEPS["Install"]["run"]], env=env, check=True, cwd=target)
    assert (target / "manifests" / "check.py").is_file()
    return target


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB", "GIT_", "PYTHON"))}
    return kept | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": "/nonexistent"}


def git(repository: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false", *arguments]
    return subprocess.run(command, cwd=repository, env=environment(), check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a signed core, a recipe, a pinned file, and the trust file of its team."""
    root = tmp_path / "repository"
    (root / "manifests" / "recipes").mkdir(parents=True)
    (root / "manifests" / "pins").mkdir()
    shutil.copy(ROOT / RECIPE, root / RECIPE)
    (root / "model.json").write_text('{"a": 1}\n')
    (root / PIN).write_text(json.dumps({"name": "model", "files": [
        {"role": "repository", "path": "model.json", "bytes": 9,
         "sha256": hashlib.sha256(b'{"a": 1}\n').hexdigest()}]}, indent=2))
    make_tiny_core(root / "cores" / "tiny")
    write_trust(root / "trust.json", trust_document())
    git(root, "init", "-q", "-b", "main")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "start")
    return root


def run_action(repository: Path, installed: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """The verify step, as the runner starts it: its script, and its variables from the inputs."""
    step = STEPS["Verify"]
    values = {"base": "HEAD~1", "trust": "trust.json", "policy": "", **inputs}
    env = environment() | {name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda m: values[m[1]], text)
                           for name, text in step["env"].items()}
    env |= {"PYTHONPATH": str(installed), "GITHUB_ACTIONS": "true", "PYTHONSAFEPATH": "1"}
    return subprocess.run(["bash", "-euo", "pipefail", "-c", step["run"]], cwd=repository, env=env, check=False,
                          capture_output=True, text=True)


def commit(repository: Path, change: Callable[[Path], object]) -> None:
    change(repository)
    git(repository, "add", "-A", ".")
    git(repository, "commit", "-q", "-m", "change")


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        text = (root / name).read_text()
        assert old in text
        (root / name).write_text(text.replace(old, new, 1))
    return apply


def line(root: Path, name: str, word: str) -> int:
    return next(number for number, text in enumerate((root / name).read_text().splitlines(), 1) if word in text)


def good_change(root: Path) -> None:
    (root / "model.json").write_text('{"a": 12}\n')
    pin = json.loads((root / PIN).read_text())
    pin["files"][0] |= {"bytes": 10, "sha256": hashlib.sha256(b'{"a": 12}\n').hexdigest()}
    (root / PIN).write_text(json.dumps(pin, indent=2))
    edit(RECIPE, 'kind: "target"', 'kind:   "target"')(root)
    make_tiny_core(root / "cores" / "second")


def test_good_change_passes(repository: Path, installed: Path) -> None:
    commit(repository, good_change)

    done = run_action(repository, installed)

    assert (done.returncode, done.stdout) == (0, "sound: 1 cores, 1 recipes, 1 pins\n"), done.stderr


def test_change_of_other_files_checks_nothing(repository: Path, installed: Path) -> None:
    commit(repository, lambda root: (root / "README").write_text("x"))

    assert run_action(repository, installed).stdout == "sound: 0 cores, 0 recipes, 0 pins\n"


def test_first_push_checks_everything(repository: Path, installed: Path) -> None:
    assert run_action(repository, installed, base="0" * 40).stdout == "sound: 1 cores, 1 recipes, 1 pins\n"


def unsigned(root: Path) -> None:
    shutil.rmtree(root / "cores" / "tiny" / "signatures")


def signed_by_stranger(root: Path) -> None:
    core = make_tiny_core(root / "cores" / "other")
    core.signature().unlink()
    core.sign(toy_key("stranger"))


def changed_weights(root: Path) -> None:
    (root / "cores" / "tiny" / WEIGHTS).write_bytes(bytes(64))


def undeclared_conversion(root: Path) -> None:
    edit(RECIPE, 'groups: "online_mxfp8:all"', 'groups: "draft_body:fp6"')(root)


ROWS = [
    ("a pinned file changed and its pin did not", lambda root: (root / "model.json").write_text('{"a": 2}\n'), PIN,
     "sha256", "PIN_DIGEST", 3),
    ("a wrong digest in a pin", edit(PIN, '"sha256": "', f'"sha256": "{"0" * 64}", "was": "'), PIN, "sha256",
     "PIN_DIGEST", 3),
    ("a wrong size in a pin", edit(PIN, '"bytes": 9', '"bytes": 8'), PIN, "bytes", "PIN_SIZE", 3),
    ("a pin of an absent file", edit(PIN, "model.json", "absent.json"), PIN, "absent.json", "PIN_FILE", 3),
    ("a pin that leaves the repository", edit(PIN, "model.json", "../model.json"), PIN, "../model.json", "PIN_FILE", 3),
    ("a pin that is no JSON", edit(PIN, "{", ""), PIN, "", "PIN_MALFORMED", 3),
    ("a pin without digests", edit(PIN, '"sha256"', '"sha1"'), PIN, "", "PIN_MALFORMED", 3),
    ("an undeclared conversion", undeclared_conversion, RECIPE, "draft_body:fp6", "RECIPE_RULE", 3),
    ("a recipe with a typing error", edit(RECIPE, "shape:", "shapes:"), RECIPE, "shapes:", "RECIPE_SYNTAX", 3),
    ("an unsigned core", unsigned, "cores/tiny/manifest.pb", "", "SIG_MISSING", 4),
    ("a core signed by a stranger", signed_by_stranger, "cores/other/manifest.pb", "", "ROLE_UNMET", 4),
    ("a core with other weights", changed_weights, "cores/tiny/manifest.pb", "", "DIGEST_MISMATCH", 4),
    ("a core without a file", lambda root: (root / "cores" / "tiny" / CONFIG).unlink(), "cores/tiny/manifest.pb", "",
     "FILE_MISSING", 4),
]


@pytest.mark.parametrize(("change", "file", "word", "code", "status"), [row[1:] for row in ROWS],
                         ids=[row[0] for row in ROWS])
def test_bad_change_fails_with_an_annotation(
    repository: Path, installed: Path, change: Callable[[Path], object], file: str, word: str, code: str, status: int
) -> None:
    commit(repository, change)
    number = line(repository, file, word) if word else 1

    done = run_action(repository, installed)

    annotations = [text for text in done.stdout.splitlines() if text.startswith("::error ")]
    assert done.returncode == status, done.stdout + done.stderr
    assert len(annotations) == 1
    assert annotations[0].startswith(f"::error file={file},line={number},title={code}::")
    assert "%0A" in annotations[0]  # a further line of the message: where, or what to do
    assert f"{file}:{number}: {code} " in done.stdout


def test_policy_of_the_team_is_asked(repository: Path, installed: Path) -> None:
    (repository / "policy.toml").write_text('format = "dflash-policy/1"\ncanary = true\n')
    commit(repository, lambda root: make_tiny_core(root / "cores" / "second"))

    done = run_action(repository, installed, policy="policy.toml")

    assert done.returncode == 7
    assert "::error file=cores/second/manifest.pb,line=1,title=POLICY_UNMET::" in done.stdout


def test_core_needs_a_trust_file(repository: Path, installed: Path) -> None:
    commit(repository, lambda root: make_tiny_core(root / "cores" / "second"))

    done = run_action(repository, installed, trust="")

    assert done.returncode == 4
    assert "title=POLICY_MISSING" in done.stdout


def test_unknown_base_is_an_error(repository: Path, installed: Path) -> None:
    done = run_action(repository, installed, base="absent")

    assert done.returncode == 2
    assert "title=BASE_UNKNOWN" in done.stdout


def test_annotation_cannot_be_broken_out_of(repository: Path, installed: Path) -> None:
    commit(repository, lambda root: (root / "cores" / "tiny" / "x\n::error file=a::y").write_text("x"))

    done = run_action(repository, installed)

    assert [text for text in done.stdout.splitlines() if text.startswith("::error file=a")] == []
    assert "title=FILE_EXTRA" in done.stdout


def test_pre_commit_hook_checks_the_files_that_it_is_given(repository: Path, installed: Path) -> None:
    (hook,) = HOOKS
    files = ["cores/tiny/manifest.pb", f"cores/tiny/{WEIGHTS}", RECIPE, PIN, "cores/a.core.zip"]
    command = [*hook["entry"].split(), "--trust", "trust.json", *files[:-1]]
    env = environment() | {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}

    good = subprocess.run(command, cwd=repository, env=env, capture_output=True, text=True, check=False)
    changed_weights(repository)
    bad = subprocess.run(command, cwd=repository, env=env, capture_output=True, text=True, check=False)

    assert hook["language"] == "python"
    assert [name for name in [*files, "README"] if not re.search(hook["files"], name)] == ["README"]
    assert (good.returncode, good.stdout) == (0, "sound: 1 cores, 1 recipes, 1 pins\n"), good.stderr
    assert (bad.returncode, "DIGEST_MISMATCH" in bad.stdout) == (4, True)


def test_every_action_that_we_use_is_pinned_by_commit() -> None:
    used = [step["uses"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "uses" in step]
    used += [step["uses"] for step in ACTION["runs"]["steps"] if "uses" in step]

    assert [name for name in used if name != "./" and not re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", name)] == []


def test_our_workflow_lints_tests_and_uses_our_own_action() -> None:
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]

    assert [step["run"] for step in steps if "run" in step] == [
        "make setup", "make lint", "make test", "make fuzz SECONDS=60"]
    assert [step["uses"] for step in steps if step.get("uses", "").startswith("./")] == ["./"]


def test_our_own_recipes_and_pins_are_sound() -> None:
    names = git(ROOT, "ls-files", "manifests/recipes", "manifests/pins").split()

    done = subprocess.run([sys.executable, "-m", "manifests.check", *names], cwd=ROOT, env=environment(),
                          capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout.startswith("sound: 0 cores, ")) == (0, True), done.stdout + done.stderr
