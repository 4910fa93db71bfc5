"""A real run whose durable checkpoints are encrypted: stopped, resumed from them, and searched for its key."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dougong.event.kinds import StateRestored
from dougong.run import manifest
from tests.run import runs

pytest.importorskip("cryptography", reason="cryptography is not installed (extra: crypto)")
pytestmark = pytest.mark.processes


def test_a_run_goes_on_from_its_encrypted_checkpoints_and_tells_the_key_to_no_file(tmp_path: Path) -> None:
    key = os.urandom(32)
    (tmp_path / "key").write_text(key.hex())
    run_dir = tmp_path / "run"
    process = runs.start(
        run_dir,
        "--durable-every",
        "5",
        "--checkpoint-key",
        str(tmp_path / "key"),
        arguments=("--steps", "200"),
    )
    runs.wait_for_step(run_dir, 20, timeout_s=150)
    process.send_signal(signal.SIGINT)
    stopped = runs.finish(process, run_dir)
    assert stopped.code == 130, stopped.report
    for stored in manifest.list_stored(str(run_dir / "checkpoints")):
        assert manifest.verify(str(run_dir / "checkpoints"), stored.directory).sealed_by
    done = runs.finish(runs.resume(run_dir), run_dir)
    assert done.code == 0, done.report
    assert done.events(StateRestored)[-1].source == "durable", done.report
    for path in run_dir.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert key not in content and key.hex().encode() not in content, path
