"""How much memory this process may still take before the kernel ends one to get some.

A tmpfs says how much it may grow to, which is often half of the memory or all of it, whatever else is in use.
Source: proc(5), MemAvailable; the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

from pathlib import Path

_SPARE_RATIO = 0.1
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def leaves_memory(num_bytes: int, *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> bool:
    """Would a tenth of the memory still be free with `num_bytes` more in use, on the host and in this cgroup?

    False where it cannot be read.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in lines)}
        limits = [(kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024)]
        groups = (proc / "self/cgroup").read_text().splitlines()
        for line in groups:
            limits += _limits_of(line, cgroups)
    except (OSError, KeyError, ValueError, IndexError):
        return False
    return all(free - num_bytes >= _SPARE_RATIO * whole for whole, free in limits)


def _limits_of(line: str, cgroups: Path) -> list[tuple[int, int]]:
    """The most that a cgroup of /proc/self/cgroup and those above it may use, and what is left of that."""
    _, controllers, path = line.split(":", 2)
    if controllers and "memory" not in controllers.split(","):
        return []
    root = cgroups / "memory" if controllers else cgroups
    own = root / path.lstrip("/")
    # inside a container the path is the host's, and what is mounted at the root is the container's own group
    above = [group for group in own.parents if group == root or root in group.parents]
    names = _V1 if controllers else _V2
    return [limit for group in dict.fromkeys((own, *above, root)) if (limit := _limit_of(group, *names)) is not None]


def _limit_of(group: Path, limit_name: str, usage_name: str, cache_name: str) -> tuple[int, int] | None:
    """None = it has no limit of its own, or is not there."""
    if not (group / limit_name).exists() or (text := (group / limit_name).read_text().strip()) == "max":
        return None
    stat = dict(entry.split() for entry in (group / "memory.stat").read_text().splitlines())
    limit_bytes = int(text)
    used_bytes = int((group / usage_name).read_text()) - int(stat.get(cache_name, 0))
    return limit_bytes, limit_bytes - used_bytes
