from __future__ import annotations

import errno

import pytest

from dougong.event.describe import describe
from dougong.event.kinds import StorageFailing, StorageRecovered
from dougong.run.storage_alarm import StorageAlarm, cause_of


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.ENOSPC, "full"),
        (errno.EDQUOT, "full"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "read-only"),
        (errno.EIO, "gone"),
        (errno.ESTALE, "gone"),
        (errno.EMFILE, "other"),
    ],
)
def test_an_error_names_its_cause(number: int, cause: str) -> None:
    assert cause_of(OSError(number, "x")) == cause


def test_what_is_no_error_of_the_system_has_another_cause() -> None:
    assert cause_of(ValueError("x")) == "other"


def test_a_full_disk_is_said_once_however_often_it_is_tried_and_its_end_is_said() -> None:
    alarm = StorageAlarm("/ckpt")
    (first,) = alarm.failed(50, cause="full", reason="rank 0: No space left on device")
    assert isinstance(first, StorageFailing)
    assert (first.step, first.cause, first.path) == (50, "full", "/ckpt")
    assert "df -h" in first.mend
    for step in range(100, 1000, 50):
        assert alarm.failed(step, cause="full", reason="the same") == ()
    (end,) = alarm.committed(1000)
    assert isinstance(end, StorageRecovered)
    assert (end.step, end.cause, end.num_missed) == (1000, "full", 19)
    assert alarm.committed(1050) == ()
    assert len(alarm.failed(1100, cause="full", reason="again")) == 1


def test_another_cause_is_news() -> None:
    alarm = StorageAlarm("/ckpt")
    assert len(alarm.failed(50, cause="full", reason="x")) == 1
    assert len(alarm.failed(100, cause="read-only", reason="x")) == 1
    assert alarm.failed(150, cause="read-only", reason="x") == ()


def test_slow_storage_is_said_once_and_over_only_when_it_kept_up_for_a_while() -> None:
    alarm = StorageAlarm("/ckpt")
    assert alarm.written(180_000_000, write_s=2.0) == ()
    (first,) = alarm.skipped(100, busy_step=50, rank=1, now_s=0.0)
    assert isinstance(first, StorageFailing) and first.cause == "slow"
    assert "rank 1" in first.reason and "step 50" in first.reason and "90 MB/s" in first.reason
    for step in range(150, 950, 100):
        assert alarm.committed(step) == ()
        assert alarm.skipped(step + 50, busy_step=step, rank=1, now_s=0.0) == ()
    said = [event for step in range(1000, 1300, 50) for event in alarm.committed(step)]
    (end,) = said
    assert isinstance(end, StorageRecovered) and end.cause == "slow" and end.num_missed == 9


def test_the_first_skip_is_said_when_the_rate_is_known() -> None:
    alarm = StorageAlarm("/ckpt")
    assert alarm.skipped(100, busy_step=50, rank=0, now_s=0.0) == ()
    (event,) = alarm.written(9_000_000, write_s=3.0)
    assert isinstance(event, StorageFailing) and event.step == 100 and "3 MB/s" in event.reason
    assert alarm.written(9_000_000, write_s=3.0) == ()


def test_storage_that_never_finishes_anything_is_said_after_half_a_minute() -> None:
    alarm = StorageAlarm("/ckpt")
    assert alarm.skipped(100, busy_step=50, rank=0, now_s=0.0) == ()
    assert alarm.skipped(150, busy_step=50, rank=0, now_s=20.0) == ()
    (event,) = alarm.skipped(200, busy_step=50, rank=0, now_s=40.0)
    assert isinstance(event, StorageFailing) and event.step == 100


def test_both_are_told_in_one_line_for_people() -> None:
    alarm = StorageAlarm("/ckpt")
    (begin,) = alarm.failed(50, cause="read-only", reason="rank 0: /ckpt: Read-only file system")
    (end,) = alarm.committed(100)
    assert describe(begin) == (
        "storage fails at step 50 (read-only): /ckpt: rank 0: /ckpt: Read-only file system; mount it writable, or mend"
        " the permissions of the directory"
    )
    assert describe(end) == "storage takes checkpoints again (step 100) after 1 checkpoint missed (read-only)"
