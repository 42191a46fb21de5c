"""A machine's memory is what it can allocate: the page cache of the weights just read is not in the way."""

from pathlib import Path

from runtime.check import available_bytes


def test_the_page_cache_counts_as_available(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       24683520 kB\nMemFree:          226192 kB\nMemAvailable:   24075264 kB\n")
    assert available_bytes(meminfo) == 24_653_070_336


def test_without_meminfo_the_free_pages_count(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "absent") > 0
