# pyright: reportMissingImports=false
"""The rows of `make bench-run` are judged as the limits say, whatever was measured and whatever is missing."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import _run_saves
from _run_ettr import EttrFigures
from _run_kills import KillFigures, Recovery, _new_step_ns
from _run_rows import Measured, Row, rows_of
from _run_saves import METHODS, Save, SaveFigures
from _run_systems import Record, first_said_ns
from _run_verify import Verdict

WHOLE = Verdict(directory="step-000000007-g001", num_tensors=882, num_bytes=1, steps=(7,), torn=())


def saves(method: str, *, block_s: float, lost_s: float, durable_s: float, is_busy: bool = False) -> SaveFigures:
    return SaveFigures(
        method=method,
        is_synced=True,
        is_busy=is_busy,
        load_average=0.1,
        base_step_s=0.6,
        floor_s=(0.2, 0.2),
        first_block_s=1.0,
        block_s=(block_s,) * 5,
        lost_s=(lost_s,) * 5,
        durable_s=(durable_s,) * 5 if durable_s else (),
        restore_s=(0.5,),
        verdict=WHOLE,
    )


def kills(system: str, *, any_step_s: float | None, source: str = "memory", is_full: bool = True) -> KillFigures:
    recovery = Recovery(victim=0, any_step_s=any_step_s, detected_s=0.1, restored_s=0.05, source=source)
    return KillFigures(system=system, is_full=is_full, load_average=0.1, step_s=0.2, recoveries=(recovery,) * 5)


def empty() -> Measured:
    return Measured(disk_floor_s=[], saves=[], kills=[], stops=[], slow_stops=[], node_losses=[], ettr=[])


def row(measured: Measured, start: str) -> Row:
    return next(row for row in rows_of(measured) if row.name.startswith(start))


def test_nothing_measured_gives_no_row() -> None:
    assert rows_of(empty()) == ()


def test_the_best_durable_peer_is_named_and_one_in_memory_alone_is_none() -> None:
    measured = empty()
    measured.saves = [
        saves("Dougong", block_s=0.001, lost_s=0.1, durable_s=1.0),
        saves("torch.save", block_s=3.8, lost_s=3.8, durable_s=3.8),
        saves("DLRover disk", block_s=0.2, lost_s=0.7, durable_s=4.7),
        saves("DLRover memory", block_s=0.0001, lost_s=0.2, durable_s=0.0),
    ]
    found = row(measured, "training thread held up")
    assert "DLRover disk" in found.name
    assert (found.ours, found.peer, found.ok) == (0.001, 0.2, True)


@pytest.mark.parametrize(("lost_s", "is_busy", "ok"), [(0.17, False, True), (0.19, False, False), (0.39, True, True)])
def test_the_time_lost_is_judged_by_the_floor_of_the_same_start(lost_s: float, is_busy: bool, ok: bool) -> None:
    measured = empty()
    measured.saves = [saves("Dougong", block_s=0.0, lost_s=lost_s, durable_s=1.0, is_busy=is_busy)]
    assert row(measured, "training time lost").ok is ok


def test_without_a_peer_the_row_says_that_its_figure_is_cited() -> None:
    measured = empty()
    measured.saves = [saves("Dougong", block_s=0.0, lost_s=0.1, durable_s=1.0)]
    assert "cited" in row(measured, "durable after").name


def test_a_recovery_that_never_came_back_misses_its_limit() -> None:
    measured = empty()
    measured.kills = [kills("Dougong", any_step_s=None), kills("torchrun", any_step_s=5.2)]
    found = row(measured, "kill -9 to first step, full")
    assert (found.ours, found.ok) == (None, False)


def test_a_recovery_without_its_step_is_a_share_of_torchruns() -> None:
    measured = empty()
    measured.kills = [kills("Dougong", any_step_s=0.7), kills("torchrun", any_step_s=5.2)]
    assert row(measured, "the same without the step itself").ours == pytest.approx(0.1)


def test_a_lost_node_that_came_back_from_disk_does_not_count_as_a_peers_copy() -> None:
    measured = empty()
    measured.node_losses = [kills("Dougong", any_step_s=0.5, source="durable")]
    found = row(measured, "node lost")
    assert found.ok is False
    assert "not there" in found.name


def test_the_smaller_of_both_counts_of_ettr_is_judged_from_below() -> None:
    measured = empty()
    figures = EttrFigures(
        load_average=0.1,
        ettr=0.97,
        by_script=0.94,
        wall_s=370.0,
        step_s=0.6,
        num_faults=6,
        num_interruptions=6,
        badput_s={},
    )
    measured.ettr = [figures]
    found = row(measured, "ETTR")
    assert (found.ours, found.ok) == (0.94, False)


def record(kind: str, *, rank: int, step: int, ns: int, name: str = "") -> Record:
    return Record(kind=kind, name=name, step=step, begin_ns=ns - 5, ns=ns, wall_ns=ns, pid=1, rank=rank)


def test_a_step_that_a_survivor_had_finished_alone_counts_as_new() -> None:
    records = (
        record("step", rank=0, step=7, ns=10),
        record("step", rank=1, step=7, ns=11),
        record("step", rank=0, step=8, ns=20),
        record("phase", rank=1, step=7, ns=40, name="loaded"),
        record("step", rank=0, step=8, ns=50),
        record("step", rank=1, step=8, ns=52),
    )
    assert _new_step_ns(records, victim=1, killed_ns=21) == 52
    assert _new_step_ns(records[:-1], victim=1, killed_ns=21) is None


def test_time_is_lost_from_the_save_to_the_step_in_which_it_is_complete(tmp_path: Path) -> None:
    ends_ns = [100, 200, 300, 400, 560, 680, 780, 880, 1080, 1210, 1310]  # saves after steps 4 and 8, 3 steps each
    records = tuple(
        record("step", rank=rank, step=step, ns=int(end * 1e6)) for step, end in enumerate(ends_ns) for rank in (0, 1)
    )
    found = [
        Save(step=step, begin_ns=int(ends_ns[step] * 1e6), block_s=0.05, end_ns=int(done * 1e6))
        for step, done in ((3, 600), (7, 1100))
    ]
    method = next(method for method in METHODS if method.name == "DLRover memory")
    figures = _run_saves._figures(method, records, found, is_busy=False, load_average=0.0, directory=tmp_path)
    assert figures.base_step_s == pytest.approx(0.1)
    assert figures.lost_s == pytest.approx((0.13,))


def test_what_a_launcher_says_first_after_the_kill_is_read_from_both_kinds_of_stamps() -> None:
    year = datetime.now().year
    old, idle = "W0101 00:00:00.000001 12 api.py:1] old", f"[{year}-11-30 20:41:33,461] [INFO] idle"
    log = f"{old}\n{idle}\n[{year}-11-30 20:41:34,461] [WARNING] lost\n"
    said_ns = first_said_ns(log, after_ns=round(datetime(year, 6, 1).timestamp() * 1e9))
    assert said_ns is not None
    assert datetime.fromtimestamp(said_ns / 1e9).second == 34
    assert said_ns // 1_000_000 % 1000 in (460, 461)  # a float holds no nanoseconds of our time
