"""Loading and checking a cluster of 16,384 accelerators, against plainly parsing the same file.

    python bench/spec_load.py [--out bench/results/spec_load.json]

Two files say the same cluster: one with ranges, one that lists each of the 2,048 nodes by itself. The target is 1 s for
either. The floor is `yaml.compose` with the same parser: lines and structure, no types and no rules.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import yaml

from dougong.spec.cluster import NodeGroup, dump_cluster, load_cluster
from dougong.spec.path import parse_range

NUM_ROUNDS = 7
TARGET_S = 1.0
EXAMPLE = Path(__file__).parents[1] / "examples" / "clusters" / "h100-16384.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/spec_load.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "listed.yaml"
        listed.write_text(_listed_one_by_one(), encoding="utf-8")
        rows = {"ranges": _measure(EXAMPLE), "one_by_one": _measure(listed)}
    for name, row in rows.items():
        print(f"{name}: load {row['load_s'] * 1e3:.1f} ms, parse alone {row['parse_s'] * 1e3:.1f} ms")
    result = {
        "benchmark": "spec_load",
        "num_accelerators": 16384,
        "num_rounds": NUM_ROUNDS,
        "files": rows,
        "target_s": TARGET_S,
        "is_reached": all(row["load_s"] <= TARGET_S for row in rows.values()),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")


def _listed_one_by_one() -> str:
    cluster = load_cluster(EXAMPLE)
    groups = tuple(NodeGroup(path=node.path, type=node.type.name) for node in cluster.nodes())
    return dump_cluster(msgspec.structs.replace(cluster, groups=groups))


def _measure(path: Path) -> dict[str, float]:
    """Medians in turn, so that a slow moment of the machine meets both."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = path.read_text(encoding="utf-8")
    load_s: list[float] = []
    parse_s: list[float] = []
    for _ in range(NUM_ROUNDS):
        parse_range.cache_clear()  # every round starts as a new process would
        load_s.append(_cpu_s(lambda: load_cluster(path)))
        parse_s.append(_cpu_s(lambda: yaml.compose(text, Loader=loader)))
    load, parse = statistics.median(load_s), statistics.median(parse_s)
    return {"load_s": round(load, 4), "parse_s": round(parse, 4), "ratio": round(load / parse, 2)}


def _cpu_s(call: Callable[[], object]) -> float:
    start_s = time.process_time()
    call()
    return time.process_time() - start_s


if __name__ == "__main__":
    main()
