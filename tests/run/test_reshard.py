"""Every parallel layout: saved by one number of ranks, loaded by another, bit for bit. Real processes over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (extra: train)")
pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parent / "scripts" / "resized.py"


def worlds(layout: str, root: Path, *sizes: int) -> list[list[dict[str, Any]]]:
    """What each rank of each world said."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), layout, str(root), *map(str, sizes)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


LAYOUTS = [
    ("ddp", (4, 3, 4)),
    ("own_buffers", (2, 3)),
    ("fsdp", (4, 3, 4)),
    ("hsdp", (4, 2)),
    ("tp", (4, 2)),
    ("fsdp_tp", (4, 2)),
    ("zero", (4, 3, 4)),
    ("pipeline", (2, 4)),
    ("named_pipeline", (4, 2)),
]


@pytest.mark.parametrize(("layout", "sizes"), LAYOUTS, ids=[layout for layout, _ in LAYOUTS])
def test_a_state_is_the_same_bit_for_bit_at_every_world_size(
    layout: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    said = worlds(layout, tmp_path, *sizes)
    assert [len(ranks) for ranks in said] == list(sizes)
    for number, ranks in enumerate(said):
        for one in ranks:
            assert one["differing"] == [], "loaded from what another world had saved"
            assert one["differing_from_memory"] == [], "rolled back in place from the own memory checkpoint"
            assert one.get("unlike_read_alone", []) == [], "one reader for all, or each for itself: the same"
            assert one.get("plain_dcp", []) == [], "torch.distributed.checkpoint itself reads it"
            assert one.get("step", 3 * number) == 3 * number


def test_a_new_rank_has_random_numbers_and_tokens_of_its_own(tmp_path: Path) -> None:
    _, _, after = worlds("ddp", tmp_path, 2, 1, 3)
    assert len({one["rng"] for one in after}) == 3
    assert [one["num_tokens"] for one in after] == [10, 0, 0], "rank 1 was away"
