"""The environment: what the code imports is declared, what is declared is locked, and the lock is complete.

A missing line hides behind a full .venv until someone installs the project elsewhere; these tests read the lines.
"""

from __future__ import annotations

import re
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.test_imports import imported_roots

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
EXTRAS: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]
OURS = {"dflash_core", "exporter", "runtime", "scripts", "tests"}
NAMESPACES = {"google": "protobuf"}  # a namespace package that several distributions share
# dflash's own requirements (datasets among them) stay out: only its model and its loop are used, as an oracle.
NOT_FOLLOWED = {"dflash"}
REQUIREMENTS = [
    *PYPROJECT["build-system"]["requires"],
    *PYPROJECT["project"]["dependencies"],
    *(requirement for extra in EXTRAS.values() for requirement in extra),
]


def lock() -> dict[str, str]:
    """Canonical distribution name to version, from requirements.lock."""
    rows = [line for line in (ROOT / "requirements.lock").read_text("utf-8").splitlines() if line[:1] not in ("", "#")]
    pins = (row.partition(" ;")[0].split("==") for row in rows)
    return {canonicalize_name(name): version for name, version in pins}


def rows_for_this_machine() -> set[str]:
    """The locked distributions that `make setup` installs here: a row may be for some platforms only."""
    rows = [line for line in (ROOT / "requirements.lock").read_text("utf-8").splitlines() if line[:1] not in ("", "#")]
    found = map(Requirement, rows)
    return {canonicalize_name(item.name) for item in found if item.marker is None or item.marker.evaluate()}


@cache
def distributions(module: str) -> set[str]:
    """The distributions that may provide a top-level module."""
    if module in NAMESPACES:
        return {NAMESPACES[module]}
    return {canonicalize_name(name) for name in metadata.packages_distributions().get(module, [module])}


def undeclared(folder: str, requirements: list[str]) -> list[str]:
    """`file:line module` of each third-party import in `folder` whose distribution is not among `requirements`."""
    declared = {canonicalize_name(Requirement(r).name) for r in requirements}
    return [
        f"{path.relative_to(ROOT)}:{line} {module}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, module in imported_roots(path)
        if module not in OURS and module not in sys.stdlib_module_names and not distributions(module) & declared
    ]


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        pytest.param("proto", [], id="contract"),
        pytest.param("runtime", ["gpu", "serve", "vision"], id="runtime-needs-gpu-serve-and-vision-at-most"),
        pytest.param("exporter", ["export"], id="exporter-needs-export"),
        pytest.param("scripts", ["demo", "export", "fuzz", "serve", "test", "vision"], id="scripts"),
        pytest.param("tests", ["demo", "export", "serve", "test", "vision"], id="tests"),
    ],
)
def test_every_import_is_declared(folder: str, extras: list[str]) -> None:
    requirements = PYPROJECT["project"]["dependencies"] + [r for extra in extras for r in EXTRAS[extra]]

    assert undeclared(folder, requirements) == []


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_lock_holds_requirement_at_its_exact_version(requirement: str) -> None:
    name, version = re.fullmatch(r"([A-Za-z0-9_.-]+)==([0-9.]+)", requirement).groups()

    assert lock().get(canonicalize_name(name)) == version


def test_lock_rows_are_exact_sorted_and_unique() -> None:
    rows = [r for r in (ROOT / "requirements.lock").read_text("utf-8").splitlines() if not r.startswith("#")]

    assert [r for r in rows if not re.fullmatch(r"[a-z0-9-]+==[0-9]+(\.[0-9a-z]+)*( ; [a-z_0-9\"<=. ]+)?", r)] == []
    assert rows == sorted(set(rows), key=lambda row: row.split("=="))


def test_lock_is_closed_under_what_its_packages_require() -> None:
    locked = lock()
    unmet = []
    for name in sorted(locked.keys() - NOT_FOLLOWED):
        for text in metadata.requires(name) or []:
            needed = Requirement(text)
            if needed.marker and not needed.marker.evaluate({"extra": ""}):
                continue
            version = locked.get(canonicalize_name(needed.name))
            if version is None or not needed.specifier.contains(version, prereleases=True):
                unmet.append(f"{name} requires {needed}, the lock has {version}")

    assert unmet == []


def test_lock_holds_nothing_that_nobody_requires() -> None:
    needed: set[str] = set()
    queue = [Requirement(r) for r in REQUIREMENTS]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        follow = [] if name in NOT_FOLLOWED or name not in lock() else metadata.requires(name) or []
        wanted = [Requirement(r) for r in follow]
        extras = ["", *requirement.extras]
        fresh = [r for r in wanted if not r.marker or any(r.marker.evaluate({"extra": e}) for e in extras)]
        queue += [r for r in fresh if canonicalize_name(r.name) not in needed or r.extras]
        needed.add(name)

    assert sorted(lock().keys() - needed) == []


def test_torch_is_pinned_without_a_build() -> None:
    assert lock()["torch"] == "2.13.0"
    assert "torch==2.13.0" in EXTRAS["export"]
    bindings = {"cuda-bindings", "cuda-pathfinder"}  # of the driver, for the runtime; no build of torch needs them
    assert {name for name in lock() if name.startswith(("nvidia-", "cuda-"))} == bindings


def test_runtime_dependencies_hold_no_framework() -> None:
    names = {canonicalize_name(Requirement(r).name) for r in PYPROJECT["project"]["dependencies"]}

    assert names & {"torch", "triton", "transformers", "safetensors"} == set()


def test_environment_is_what_the_lock_says() -> None:
    wanted = {name: version for name, version in lock().items() if name in rows_for_this_machine()}

    assert {name: metadata.version(name).split("+")[0] for name in wanted} == wanted


def test_project_has_the_three_commands() -> None:
    assert PYPROJECT["project"]["scripts"].keys() == {"dflash-export", "dflash-combine", "dflash-run"}


@pytest.mark.parametrize("target", ["setup", "demo", "test", "lint", "fmt", "proto", "bench-cpu", "bench-verify",
                                    "fuzz"])
def test_every_make_target_first_makes_the_environment(target: str) -> None:
    rule = re.search(rf"^{target}:(.*?)##", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)

    assert rule is not None
    assert "$(READY)" in rule[1].split()
