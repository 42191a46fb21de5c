"""A core is whole or absent: whatever ends an export, nothing half-written carries its name."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
from dflash_core.errors import ResourceError, UsageError

from exporter import staging
from exporter.staging import PARTIAL_SUFFIX, check_output, staged
from tests.tiny_pair import write_pair


def write_core(folder: Path, text: str = "new") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.pb").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_folder_takes_its_name_when_the_block_ends(tmp_path):
    out = tmp_path / "deep" / "er" / "core"

    with staged(out, force=False) as folder:
        write_core(folder)
        inside = (out.exists(), folder.parent, folder.name.startswith(".core."), folder.name.endswith(PARTIAL_SUFFIX))

    assert inside == (False, out.parent, True, True)
    assert (out / "manifest.pb").read_text() == "new"
    assert names(out.parent) == ["core"]
    assert out.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit, MemoryError])
def test_nothing_is_left_when_the_block_fails(failure, tmp_path):
    with pytest.raises(failure), staged(tmp_path / "core", force=False) as folder:
        write_core(folder)
        raise failure

    assert names(tmp_path) == []


def test_replaced_core_stays_when_the_block_fails(tmp_path):
    write_core(tmp_path / "core", "old")

    with pytest.raises(KeyboardInterrupt), staged(tmp_path / "core", force=True) as folder:
        write_core(folder)
        raise KeyboardInterrupt

    assert (tmp_path / "core" / "manifest.pb").read_text() == "old"
    assert names(tmp_path) == ["core"]


def test_force_replaces_a_core_with_all_its_files(tmp_path):
    write_core(tmp_path / "core", "old")
    (tmp_path / "core" / "weights").mkdir()

    with staged(tmp_path / "core", force=True) as folder:
        write_core(folder)

    assert names(tmp_path / "core") == ["manifest.pb"]
    assert (tmp_path / "core" / "manifest.pb").read_text() == "new"
    assert names(tmp_path) == ["core"]


def make_core(path: Path) -> None:
    write_core(path, "old")


def make_file(path: Path) -> None:
    path.write_text("mine")


def make_folder(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("mine")


def make_link(path: Path) -> None:
    write_core(path.parent / "elsewhere", "old")
    path.symlink_to(path.parent / "elsewhere")


def make_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


EXISTS, NO_CORE = "the output exists", "the output exists and is not a core, so --force does not replace it"


@pytest.mark.parametrize(
    ("make", "force", "what"),
    [
        pytest.param(make_core, False, EXISTS, id="core without force"),
        pytest.param(make_file, False, EXISTS, id="file without force"),
        pytest.param(make_dangling_link, False, EXISTS, id="dangling link without force"),
        pytest.param(make_file, True, NO_CORE, id="file"),
        pytest.param(make_folder, True, NO_CORE, id="folder that is no core"),
        pytest.param(make_link, True, NO_CORE, id="link to a core"),
        pytest.param(make_dangling_link, True, NO_CORE, id="dangling link"),
    ],
)
def test_refuses_an_output_that_exists(make, force, what, tmp_path):
    out = tmp_path / "core"
    make(out)
    before = names(tmp_path)

    with pytest.raises(UsageError) as refused, staged(out, force=force):
        raise AssertionError("the block must not run")

    assert (refused.value.code, refused.value.what, refused.value.where) == ("OUTPUT_EXISTS", what, str(out))
    assert names(tmp_path) == before


@pytest.mark.parametrize(("make", "force"), [(None, False), (None, True), (make_core, True)])
def test_accepts_a_free_name_and_a_core_to_replace(make, force, tmp_path):
    if make is not None:
        make(tmp_path / "core")

    check_output(tmp_path / "core", force=force)


def test_core_that_appeared_meanwhile_is_not_replaced_without_force(tmp_path):
    with pytest.raises(UsageError) as refused, staged(tmp_path / "core", force=False) as folder:
        write_core(folder)
        write_core(tmp_path / "core", "theirs")

    assert refused.value.code == "OUTPUT_EXISTS"
    assert (tmp_path / "core" / "manifest.pb").read_text() == "theirs"
    assert names(tmp_path) == ["core"]


@pytest.mark.parametrize("name", ["core", "core[1]", "c*re", "core.v2"])
def test_folder_of_a_dead_export_is_removed_and_of_another_name_is_not(name, tmp_path):
    for left in (f".{name}.abc{PARTIAL_SUFFIX}", f".other.abc{PARTIAL_SUFFIX}", ".cure.abc.partial"):
        write_core(tmp_path / left)

    with staged(tmp_path / name, force=False) as folder:
        write_core(folder)

    assert names(tmp_path) == sorted([".cure.abc.partial", ".other.abc.partial", name])


def test_folder_of_a_running_export_is_left_alone(tmp_path):
    with staged(tmp_path / "core", force=False) as first:
        write_core(first, "first")
        with pytest.raises(RuntimeError), staged(tmp_path / "core", force=False) as second:
            write_core(second, "second")
            raise RuntimeError

        assert (first / "manifest.pb").read_text() == "first"

    assert (tmp_path / "core" / "manifest.pb").read_text() == "first"


REFUSALS = [
    (errno.EACCES, "NOT_WRITABLE", "permission denied"), (errno.EPERM, "NOT_WRITABLE", "operation not permitted"),
    (errno.EROFS, "NOT_WRITABLE", "read-only file system"), (errno.ENOSPC, "NO_SPACE", "no space left on device"),
    (errno.EDQUOT, "NO_SPACE", "disk quota exceeded"), (errno.EIO, "WRITE_FAILED", "input/output error"),
]  # fmt: skip


@pytest.mark.parametrize(("number", "code", "words"), REFUSALS)
def test_folder_that_cannot_be_made_names_its_parent(number, code, words, tmp_path, monkeypatch):
    def refuse(**options):
        raise OSError(number, "no")
    monkeypatch.setattr(staging.tempfile, "mkdtemp", refuse)

    with pytest.raises(ResourceError) as refused, staged(tmp_path / "core", force=False):
        raise AssertionError("the block must not run")

    error = refused.value
    assert (error.code, error.what, error.where) == (code, f"cannot write the output: {words}", str(tmp_path))
    assert error.hint == "choose a folder that you can write to, with room for the core"
    assert isinstance(error.__cause__, OSError)


@pytest.mark.parametrize(("number", "code", "words"), REFUSALS)
def test_name_that_cannot_be_taken_leaves_nothing(number, code, words, tmp_path, monkeypatch):
    def refuse(self, target):
        raise OSError(number, "no")
    monkeypatch.setattr(Path, "rename", refuse)

    with pytest.raises(ResourceError) as refused, staged(tmp_path / "core", force=False) as folder:
        write_core(folder)

    assert (refused.value.code, refused.value.where) == (code, str(tmp_path / "core"))
    assert names(tmp_path) == []


def test_parent_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")

    with pytest.raises(ResourceError) as refused, staged(tmp_path / "file" / "core", force=False):
        raise AssertionError("the block must not run")

    assert (refused.value.code, refused.value.where) == ("WRITE_FAILED", str(tmp_path / "file"))


CHILD = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path
from exporter.export import ExportRequest, export
from runtime import TrustPolicy, verify
from runtime.keys import generate_key, load_private_key

root, rounds = Path(sys.argv[1]), int(sys.argv[2])
generate_key(root / "keys")
key, trust = load_private_key(root / "keys" / "key.pem"), TrustPolicy.load(root / "keys" / "trust.json")
place = root / "place"

def run(force):
    child = os.fork()
    if child == 0:
        export(ExportRequest(target=root / "target", draft=root / "draft", out=place / "core", force=force), key)
        os._exit(0)
    return child

def finish(force):
    started = time.monotonic()
    _, status = os.waitpid(run(force), 0)
    assert status == 0, status
    return time.monotonic() - started

def state():
    if not (place / "core").exists():
        return "absent"
    verify(place / "core", trust).close()
    return "whole"

def partial():
    return [place / name for name in os.listdir(place) if name.endswith(".partial")]

took = finish(force=False)
rng, killed, states, left = random.Random(7), 0, [], 0
for i in range(rounds):
    if i % 2 == 0 and (place / "core").exists():
        (place / "core").rename(root / f"before{i}")
    seen = i % 2 == 1  # killed as soon as it writes; the others at a moment drawn from a whole export
    for old in partial() if seen else ():
        shutil.rmtree(old)
    child = run(force=True)
    while seen and not partial():
        time.sleep(0.001)
    time.sleep(0 if seen else rng.uniform(0, took))
    os.kill(child, signal.SIGKILL)
    killed += os.waitpid(child, 0)[1] == signal.SIGKILL
    left += bool(partial())
    states.append(state())
finish(force=True)
print(json.dumps({"killed": killed, "states": states, "left": left, "last": state(), "names": os.listdir(place)}))
"""


def test_export_killed_at_any_moment_leaves_a_whole_core_or_none_and_the_next_one_cleans_up(tmp_path, repo_root):
    write_pair(tmp_path, seed=2)

    child = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path), "12"], capture_output=True, text=True,
                           timeout=100, cwd=repo_root)

    assert child.returncode == 0, child.stderr
    told = json.loads(child.stdout)
    assert told["killed"] >= 6
    assert told["left"] >= 6
    assert set(told["states"]) <= {"absent", "whole"}
    assert (told["last"], told["names"]) == ("whole", ["core"])


def test_interrupted_export_leaves_nothing(tmp_path):
    from exporter.export import ExportRequest, export
    from exporter.progress import Silent
    from runtime.keys import generate_key, load_private_key

    class Interrupting(Silent):
        def done(self, name: str, details: str) -> None:
            if name == "convert":
                raise KeyboardInterrupt

    write_pair(tmp_path, seed=2)
    generate_key(tmp_path / "keys")

    with pytest.raises(KeyboardInterrupt):
        export(ExportRequest(target=tmp_path / "target", out=tmp_path / "place" / "core"),
               load_private_key(tmp_path / "keys" / "key.pem"), Interrupting())

    assert names(tmp_path / "place") == []


def test_folder_that_can_be_gone_on_with_is_taken_and_others_are_removed(tmp_path):
    for name in ("a", "b", "c"):
        left = tmp_path / f".core.{name}{PARTIAL_SUFFIX}"
        left.mkdir()
        (left / "half").write_text(name)

    with staged(tmp_path / "core", force=False, resumable=lambda left: (left / "half").read_text() != "a") as folder:
        inside = (folder.name, names(tmp_path))
        write_core(folder)

    assert inside == (f".core.b{PARTIAL_SUFFIX}", [f".core.b{PARTIAL_SUFFIX}"])
    assert names(tmp_path) == ["core"]


def test_folder_that_is_in_use_is_neither_taken_nor_removed(tmp_path):
    with staged(tmp_path / "core", force=False) as first:
        (first / "half").write_text("mine")
        with staged(tmp_path / "core", force=False, resumable=lambda left: True) as second:
            write_core(second)
        assert second != first and (first / "half").read_text() == "mine"
        (tmp_path / "core" / "manifest.pb").unlink()
        (tmp_path / "core").rmdir()
        write_core(first)
