"""What is free on the host."""

from pathlib import Path

import pytest

from zoo.engine.devices import free_host_bytes


@pytest.mark.parametrize(("limit", "free"), [("max", 3000), ("1048576", 1024 - 600 + 200)])
def test_memory_that_files_fill_is_free_up_to_the_limit_of_a_container(
    tmp_path: Path, limit: str, free: int
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemFree:  100 kB\nMemAvailable:  3000 kB\n")
    assert free_host_bytes(meminfo, tmp_path) == 3000 * 1024
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{600 * 1024}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {200 * 1024}\n")
    assert free_host_bytes(meminfo, tmp_path) == free * 1024


def test_where_a_system_tells_less_its_free_pages_count(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path / "none", tmp_path) > 0
