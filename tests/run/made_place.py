"""The place of a worker that a test plays, as its agent would give it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dougong.run.layout import NodeDirectory
from dougong.run.place import WorkerPlace

NEVER = 1000


def place_in(root: Path, **changes: Any) -> WorkerPlace:
    """Rank 0 of one, in generation 1, that starts from scratch and is seldom saved. The node's directory is there."""
    node = NodeDirectory(root / "node")
    node.root.mkdir(parents=True, exist_ok=True)
    given: dict[str, Any] = {
        "run_id": "test",
        "run_root": str(root),
        "node_root": str(node.root),
        "checkpoint_url": str(root / "checkpoints"),
        "generation": 1,
        "rank": 0,
        "local_rank": changes.get("rank", 0),
        "world_size": 1,
        "restore_source": "none",
        "restore_step": 0,
        "restore_directory": "",
        "memory_every_steps": 5,
        "durable_every_steps": NEVER,
        "commit_timeout_s": 0.5,
        "wants_peak": False,
        "is_chaos": False,
    }
    return WorkerPlace(**{**given, **changes})
