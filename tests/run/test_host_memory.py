"""Whether there is memory for more, as the kernel tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dougong.run.host_memory import leaves_memory

MIB = 2**20


def told(root: Path, *, total_mib: int, available_mib: int, cgroup: str = "0::/job") -> dict[str, Path]:
    (root / "proc/self").mkdir(parents=True)
    text = f"MemTotal: {total_mib * 1024} kB\nMemFree: 1 kB\nMemAvailable: {available_mib * 1024} kB\n"
    (root / "proc/meminfo").write_text(text)
    (root / "proc/self/cgroup").write_text(f"3:cpuset:/\n{cgroup}\n")
    (root / "cgroup").mkdir()
    return {"proc": root / "proc", "cgroups": root / "cgroup"}


def test_a_tenth_of_the_host_is_left(tmp_path: Path) -> None:
    where = told(tmp_path, total_mib=1000, available_mib=400)
    assert leaves_memory(300 * MIB, **where)
    assert not leaves_memory(301 * MIB, **where)


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/job", "job", ("memory.max", "memory.current", "inactive_file")),
        ("0::/above/job", "above", ("memory.max", "memory.current", "inactive_file")),
        ("0::/of/the/host", "", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:memory:/job",
            "memory/job",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_a_cgroup_may_leave_less_than_the_host(tmp_path: Path, line: str, folder: str, names: tuple[str, ...]) -> None:
    where = told(tmp_path, total_mib=10_000, available_mib=9_000, cgroup=line)
    group = where["cgroups"] / folder
    group.mkdir(parents=True, exist_ok=True)
    limit, usage, cache = names
    (group / limit).write_text(f"{100 * MIB}\n")
    (group / usage).write_text(f"{80 * MIB}\n")
    (group / "memory.stat").write_text(f"anon 1\n{cache} {30 * MIB}\n")
    assert leaves_memory(40 * MIB, **where)
    assert not leaves_memory(41 * MIB, **where)


def test_a_cgroup_without_a_limit_is_the_hosts_matter(tmp_path: Path) -> None:
    where = told(tmp_path, total_mib=1000, available_mib=400)
    (where["cgroups"] / "job").mkdir()
    (where["cgroups"] / "job/memory.max").write_text("max\n")
    assert leaves_memory(300 * MIB, **where)


def test_what_cannot_be_read_is_not_taken_for_room(tmp_path: Path) -> None:
    assert not leaves_memory(1, proc=tmp_path, cgroups=tmp_path)


def test_this_machine_can_be_read() -> None:
    assert leaves_memory(1)
