"""Scripts written to the interfaces of other runtimes go through faults after a change of their imports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dougong.event.kinds import JobStopped, RecoveryDecided
from tests.run import runs

torch = pytest.importorskip("torch", reason="torch is not installed (extra: train)")

FLASH = Path(__file__).parent / "scripts" / "flash.py"


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "run"
    yield path
    runs.end_all(path)


def train(run_dir: Path, *options: str, steps: int = 48) -> runs.Finished:
    arguments = ("--steps", str(steps), "--directory", str(run_dir.with_suffix(".own")))
    done = runs.run(run_dir, *options, "--no-score", script=FLASH, arguments=arguments)
    assert done.code == 0, done.report
    return done


def weight(done: runs.Finished) -> str:
    return done.stdout.split("weight ")[1].split()[0]


@pytest.mark.processes
def test_flash_checkpoint_goes_through_faults(run_dir: Path, tmp_path: Path) -> None:
    quiet = train(tmp_path / "quiet")
    kill = "kind: kill-worker, at_step: 10, rank: 1"
    loss = "kind: kill-node, at_step: 30, node: local/rack-01/node-02"
    chaos = runs.write_chaos(tmp_path / "chaos.yaml", kill, loss)
    done = train(run_dir, "--spares", "1", "--set", "save.peer_copies=0", "--chaos", str(chaos))
    decided = [(event.restore_source, event.restore_step) for event in done.events(RecoveryDecided)]
    assert decided == [("memory", 8), ("durable", 24)]
    assert weight(done) == weight(quiet), "dropout too goes on as it would have"
    assert "from 24, subsequent True" in done.stdout


@pytest.mark.processes
def test_a_flash_checkpoint_script_stops_at_its_next_save(run_dir: Path) -> None:
    arguments = ("--steps", "120", "--directory", str(run_dir.with_suffix(".own")))
    process = runs.start(run_dir, "--no-score", script=FLASH, arguments=arguments)
    runs.wait_for_step(run_dir, 3)
    process.send_signal(2)
    stopped = runs.finish(process, run_dir)
    assert stopped.code == 130, stopped.report
    step = stopped.events(JobStopped)[0].step
    assert step % 4 == 0
    done = runs.finish(runs.resume(run_dir), run_dir)
    assert done.code == 0, done.report
    assert f"from {step}," in done.stdout


def test_without_a_run_flash_checkpoint_writes_files(tmp_path: Path) -> None:
    from dougong.compat.dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

    own = DdpCheckpointer(str(tmp_path))
    assert own.load_checkpoint() == {}
    own.save_checkpoint(3, {"w": torch.ones(2), "step": 3}, storage_type=StorageType.MEMORY)
    assert own.load_checkpoint() == {}, "memory is a run's"
    own.save_checkpoint(4, {"w": torch.ones(2), "step": 4})
    own.save_checkpoint(5, {"w": torch.ones(2), "step": 5}, path=str(tmp_path / "five.pt"))
    assert DdpCheckpointer(str(tmp_path)).load_checkpoint()["step"] == 5
    assert own.load_checkpoint(str(tmp_path / "4" / "rank_0.pt"))["step"] == 4


def test_a_heartbeat_client_without_a_run_only_measures() -> None:
    from dougong.compat.nvidia_resiliency_ext.fault_tolerance import RankMonitorClient, RankMonitorClientError

    client = RankMonitorClient()
    with pytest.raises(RankMonitorClientError, match="not initialized"):
        client.send_heartbeat()
    client.init_workload_monitoring()
    with pytest.raises(RankMonitorClientError, match="already"):
        client.init_workload_monitoring()
    assert not client.calculate_and_set_hb_timeouts(skip_if_not_ready=True)
    with pytest.raises(RankMonitorClientError, match="Not enough data"):
        client.calculate_and_set_hb_timeouts()
    for _ in range(3):
        client.start_section("step")
        client.send_heartbeat()
        client.end_section("step")
    with pytest.raises(RankMonitorClientError, match="not open"):
        client.end_section("step")
    assert client.calculate_and_set_hb_timeouts()
    assert client.calculate_and_set_section_timeouts()
    state = client.state_dict()
    again = RankMonitorClient()
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert again.hb_timeouts.are_valid
    assert state["current_timeouts"]["section"]["calculated_sections"] == ["step"]
    client.shutdown_workload_monitoring()
