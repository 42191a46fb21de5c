"""Which way imports point: exporter -> runtime -> dflash_core, and what each of them may load.

The runtime serves on machines without torch, so a single stray import breaks it there and nowhere else. Source is
checked line by line, and a fresh interpreter shows what really gets loaded, transitively.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEVER_IN_RUNTIME = {"exporter", "safetensors", "scripts", "tests", "torch", "transformers", "triton"}
ALLOWED = {
    "proto": {"dflash_core", "google"},
    "runtime": {
        "PIL", "cryptography", "cuda", "dflash_core", "google", "jinja2", "ml_dtypes", "numpy", "prometheus_client",
        "pydantic", "rich", "runtime", "starlette", "tokenizers", "typer", "uvicorn",
    },
}


def modules(package: str, folder: Path) -> list[str]:
    """Dotted names of the modules in `folder`, the package itself first."""
    names = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        names.append(".".join([package, *(p for p in parts if p != "__init__")]))
    return sorted(names)


def loaded_after(*names: str) -> set[str]:
    """Top-level modules in `sys.modules` after a fresh interpreter imported `names`."""
    code = (
        "import importlib, json, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def imported_roots(path: Path) -> Iterator[tuple[int, str]]:
    """Line and top-level name of every import in a file, inside functions too; relative ones stay in the package."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.split(".")[0]


def disallowed(folder: Path, allowed: set[str]) -> list[str]:
    """`file:line name` of each import that is neither of the standard library nor allowed."""
    return [
        f"{path.relative_to(folder)}:{line} {name}"
        for path in sorted(folder.rglob("*.py"))
        for line, name in imported_roots(path)
        if name not in allowed and name not in sys.stdlib_module_names
    ]


def test_runtime_alone_loads_neither_numpy_nor_rich() -> None:
    assert loaded_after("runtime") & (NEVER_IN_RUNTIME | {"numpy", "rich"}) == set()


def test_every_runtime_module_together_loads_nothing_of_the_exporter() -> None:
    names = modules("runtime", ROOT / "runtime")

    assert "runtime" in names
    assert loaded_after(*names) & NEVER_IN_RUNTIME == set()


def test_every_contract_module_together_loads_protobuf_and_no_more() -> None:
    names = modules("dflash_core", ROOT / "proto" / "dflash_core")

    assert "dflash_core.v1.manifest_pb2" in names
    assert loaded_after(*names) & (NEVER_IN_RUNTIME | {"cryptography", "numpy", "rich", "runtime"}) == set()


@pytest.mark.parametrize("folder", ["proto", "runtime"])
def test_source_imports_only_what_its_layer_may(folder: str) -> None:
    assert disallowed(ROOT / folder, ALLOWED[folder]) == []


def test_exporter_does_not_import_tests_or_scripts() -> None:
    roots = {name for path in (ROOT / "exporter").rglob("*.py") for _, name in imported_roots(path)}

    assert roots & {"tests", "scripts"} == set()


@pytest.mark.parametrize("folder", ["exporter", "proto", "runtime", "scripts", "tests"])
def test_no_folder_installs_the_draft_authors_name(folder: str) -> None:
    assert [path.name for path in (ROOT / folder).rglob("dflash") if path.is_dir()] == []
    assert list((ROOT / folder).rglob("dflash.py")) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        pytest.param("import torch", ["a.py:1 torch"], id="plain"),
        pytest.param("import torch.nn as nn", ["a.py:1 torch"], id="submodule"),
        pytest.param("from exporter.plan import plan", ["a.py:1 exporter"], id="from"),
        pytest.param("def f():\n    import triton", ["a.py:2 triton"], id="inside-a-function"),
        pytest.param("try:\n    import torch\nexcept ImportError:\n    pass", ["a.py:2 torch"], id="guarded"),
        pytest.param("import os\nimport numpy\nfrom . import b\nfrom .c import d", [], id="allowed"),
    ],
)
def test_finds_a_disallowed_import_wherever_it_stands(tmp_path: Path, source: str, found: list[str]) -> None:
    (tmp_path / "a.py").write_text(source)

    assert disallowed(tmp_path, {"numpy"}) == found
