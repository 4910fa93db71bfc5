"""The settings of a run that never ran."""

from __future__ import annotations

from pathlib import Path

import dougong
from dougong.run.settings import FORMAT_VERSION, HangRule, Policy, RunSettings, SaveRule


def settings_at(root: Path) -> RunSettings:
    return RunSettings(
        format_version=FORMAT_VERSION,
        run_id="r",
        version=dougong.__version__,
        command=("train.py", "--lr", "3e-4"),
        working_directory=str(root),
        backend="local",
        cluster_name="local",
        nodes=("local/rack-01/node-01", "local/rack-01/node-02"),
        spares=("local/rack-01/node-03",),
        num_accelerators=4,
        procs_per_node=2,
        policy=Policy(),
        hang=HangRule(),
        save=SaveRule(),
        checkpoint_url=str(root / "checkpoints"),
        memory_root=str(root / "memory"),
        threads_per_worker=1,
    )
