"""Make a core from a checkpoint before it is served or measured, once: the same inputs are found again.

    prepared = prepare(Path("model"), PrepareSettings(draft=Path("draft"), draft_body="mxfp8"), cache_folder())
    prepared.core, prepared.trust

The runtime knows no exporter: it runs `dflash-export` as a process of its own, with a key that it makes for this
machine and whose trust file accepts nothing else.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_core.errors import ExitCode, ResourceError, UsageError

from runtime.keys import generate_key

_EXPORT = "from exporter.cli import export_main; export_main()"


@dataclass(frozen=True, slots=True)
class PrepareSettings:
    """The export's precision settings, batch buckets and device; absent ones are as `dflash-export` has them.

    Attributes:
        device: as `dflash-export` names it: "cpu", or "cuda:sm_90" for a core that also runs there.
    """

    draft: Path | None = None
    online_mxfp8_scope: str | None = None
    draft_body: str | None = None
    draft_head: str | None = None
    batches: tuple[int, ...] = (1, 4)
    device: str = "cpu"

    def arguments(self) -> list[str]:
        """As `dflash-export` takes them."""
        given = (("--draft", self.draft), ("--online-mxfp8-scope", self.online_mxfp8_scope),
                 ("--draft-body-quantization", self.draft_body), ("--draft-head-quantization", self.draft_head),
                 ("--device", self.device))
        return [text for name, value in given if value is not None for text in (name, str(value))] + [
            text for batch in self.batches for text in ("--batch", str(batch))]

    @property
    def asked(self) -> bool:
        """Whether anything was asked for that only an export can do."""
        return any((self.draft, self.online_mxfp8_scope, self.draft_body, self.draft_head))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A core that is ready to load; `made` is False when it was found in the cache."""

    core: Path
    trust: Path
    made: bool


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a model as published: a folder with a config and no manifest."""
    return (path / "config.json").is_file() and not (path / "manifest.pb").exists()


def export_device(device: str) -> str:
    """What `dflash-export --device` calls the device that a command is to run on.

    Raises:
        CompatibilityError, DriverError: it is a GPU that is not there.
    """
    from runtime.gpu.device import is_gpu, open_device

    if not is_gpu(device):
        return "cpu"
    opened = open_device(device)
    try:
        return f"cuda:{opened.facts.name}"
    finally:
        opened.close()


def cache_folder() -> Path:
    """Where prepared cores are kept: $XDG_CACHE_HOME/dflash, or ~/.cache/dflash."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash"


def prepare(checkpoint: Path, settings: PrepareSettings, cache: Path) -> Prepared:
    """Export a checkpoint into the cache, unless a core of the same files and settings is there.

    Files count as the same by name, size and time of change.

    Raises:
        UsageError: EXTRA_MISSING, the exporter is not installed; EXPORT_FAILED, it refused (its message is on stderr).
        ResourceError: CACHE; the cache cannot be written.
    """
    keys = cache / "keys"
    folder = cache / "cores" / _identity(checkpoint, settings)
    if (folder / "manifest.pb").is_file() and (keys / "trust.json").is_file():
        return Prepared(folder, keys / "trust.json", False)
    if importlib.util.find_spec("exporter") is None or importlib.util.find_spec("torch") is None:
        raise UsageError("EXTRA_MISSING", "a checkpoint needs the exporter, which is not installed",
                         where=str(checkpoint), hint="pip install 'dflash-cores[export]', or give a core")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not (keys / "trust.json").is_file():
            generate_key(keys)
    except OSError as e:
        raise ResourceError("CACHE", f"cannot prepare a core: {e.strerror}", where=str(cache),
                            hint="set XDG_CACHE_HOME to a folder that you can write to") from e
    done = subprocess.run(
        [sys.executable, "-c", _EXPORT, str(checkpoint), "--out", str(folder), "--key", str(keys / "key.pem"), "--name",
         _name(checkpoint), "--force", *settings.arguments()], stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise UsageError("EXPORT_FAILED", "the checkpoint could not be exported", where=str(checkpoint),
                         expected=int(ExitCode.OK), got=f"exit status {done.returncode}",
                         hint="the exporter's own message is above")
    return Prepared(folder, keys / "trust.json", True)


def _name(checkpoint: Path) -> str:
    return checkpoint.resolve().name.lower()


def _identity(checkpoint: Path, settings: PrepareSettings) -> str:
    folders = [checkpoint, *([settings.draft] if settings.draft else [])]
    files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns)
             for folder in folders for path in sorted(folder.glob("*")) if path.is_file()]
    text = json.dumps([files, {name: str(value) for name, value in asdict(settings).items()}])
    return hashlib.sha256(text.encode()).hexdigest()[:32]
