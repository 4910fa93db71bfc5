"""A run has one time, whatever happens to the wall clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from dougong.clock import CarriedClock, ManualClock, OffClock
from dougong.run import timeline
from dougong.run.layout import RunDirectory


class JumpingClock(ManualClock):
    jump_ns = 0

    def wall_ns(self) -> int:
        return super().wall_ns() + self.jump_ns


@pytest.mark.parametrize("jump_s", [-7200, 7200])
def test_a_controller_that_starts_after_a_jump_goes_on_with_the_time_of_the_run(tmp_path: Path, jump_s: int) -> None:
    run, clock = RunDirectory(tmp_path), JumpingClock(start_ns=10**18)
    timeline.drop_anchor(run, clock)
    clock.advance_s(5.0)
    clock.jump_ns = jump_s * 10**9
    assert timeline.run_clock(run, clock).wall_ns() == 10**18 + 5 * 10**9


def test_a_jump_while_it_runs_does_not_reach_it() -> None:
    clock = JumpingClock(start_ns=7)
    carried = CarriedClock(clock, offset_ns=clock.wall_ns() - clock.monotonic_ns())
    clock.jump_ns = 10**12
    clock.advance_s(1.0)
    assert carried.wall_ns() == 7 + 10**9


def test_the_note_of_an_earlier_boot_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, clock = RunDirectory(tmp_path), JumpingClock(start_ns=3)
    timeline.drop_anchor(run, clock)
    boot = tmp_path / "boot_id"
    boot.write_text("another")
    monkeypatch.setattr(timeline, "_BOOT_ID", boot)
    clock.jump_ns = 100
    assert timeline.run_clock(run, clock).wall_ns() == 103


def test_a_full_disk_does_not_hinder_the_start(tmp_path: Path) -> None:
    run, clock = RunDirectory(tmp_path / "file" / "below"), JumpingClock(start_ns=3)
    (tmp_path / "file").touch()
    timeline.drop_anchor(run, clock)
    assert timeline.run_clock(run, clock).wall_ns() == 3


def test_a_turned_clock_is_off_by_what_its_file_says(tmp_path: Path) -> None:
    path = tmp_path / "offset"
    clock = OffClock(path)
    before_ns = clock.wall_ns()
    path.write_text(str(3600 * 10**9))
    assert clock.wall_ns() - before_ns >= 3600 * 10**9
    path.write_text("torn")
    assert clock.wall_ns() - before_ns < 3600 * 10**9
