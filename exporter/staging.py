"""A core is written beside its final name, then renamed: it is whole or absent.

    with staged(Path("out/core"), force=False) as staging:
        write_everything(staging)
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_core.errors import ResourceError, UsageError

PARTIAL_SUFFIX = ".partial"


@contextmanager
def staged(out: Path, *, force: bool, resumable: Callable[[Path], bool] | None = None) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` when the block ends well, and vanishes when it does not.

    A process that is killed leaves its folder, hidden and marked `.partial`; the next export to the same name goes on
    with it or removes it, unless its process still runs.

    Args:
        force: replace a core that is already there.
        resumable: whether a folder that was left holds a part of the same work; None: none does.
    Raises:
        UsageError: OUTPUT_EXISTS; something is there and `force` is off, or it is not a core.
        ResourceError: NOT_WRITABLE, NO_SPACE or WRITE_FAILED, with the path.
    """
    check_output(out, force=force)
    out = out.parent.resolve() / out.name
    with writing(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        left = _take_stale(out, resumable)
        if left is None:
            staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=PARTIAL_SUFFIX, dir=out.parent))
            lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
        else:
            staging, lock = left
    try:
        yield staging
        check_output(out, force=force)
        with writing(out):
            staging.chmod(0o755)
            _replace(staging, out)
    finally:
        os.close(lock)
        shutil.rmtree(staging, ignore_errors=True)


def check_output(out: Path, *, force: bool) -> None:
    """Refuse an output that exists, before any work is done.

    Raises:
        UsageError: OUTPUT_EXISTS.
    """
    if not os.path.lexists(out):
        return
    if not force:
        raise UsageError("OUTPUT_EXISTS", "the output exists", where=str(out),
                         hint="choose another name, or pass --force to replace the core")
    if not (out.is_dir() and not out.is_symlink() and (out / "manifest.pb").is_file()):
        raise UsageError("OUTPUT_EXISTS", "the output exists and is not a core, so --force does not replace it",
                         where=str(out), hint="choose another name")


def _replace(staging: Path, out: Path) -> None:
    if not out.exists():
        staging.rename(out)
    else:
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=PARTIAL_SUFFIX, dir=out.parent))
        out.rename(aside / "replaced")
        staging.rename(out)
        shutil.rmtree(aside, ignore_errors=True)
    descriptor = os.open(out.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take_stale(out: Path, resumable: Callable[[Path], bool] | None) -> tuple[Path, int] | None:
    """The first folder that a killed export left and that can be gone on with, and its lock; all others are removed."""
    taken = None
    for left in sorted(out.parent.glob(f".{glob.escape(out.name)}.*{PARTIAL_SUFFIX}")):
        descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        if taken is None and resumable is not None and resumable(left):
            taken = left, descriptor
            continue
        shutil.rmtree(left, ignore_errors=True)
        os.close(descriptor)
    return taken


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around whatever writes to `path`: what the system refuses becomes a ResourceError that names it.

    Raises:
        ResourceError: NOT_WRITABLE, NO_SPACE or WRITE_FAILED.
    """
    try:
        yield
    except OSError as e:
        code = {errno.ENOSPC: "NO_SPACE", errno.EDQUOT: "NO_SPACE", errno.EACCES: "NOT_WRITABLE",
                errno.EPERM: "NOT_WRITABLE", errno.EROFS: "NOT_WRITABLE"}.get(e.errno or 0, "WRITE_FAILED")
        raise ResourceError(code, f"cannot write the output: {os.strerror(e.errno or 0).lower()}", where=str(path),
                            hint="choose a folder that you can write to, with room for the core") from e
