from __future__ import annotations

import errno
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dougong.errors import CheckpointDamaged
from dougong.run.snapshot import SnapshotFiles

WRITER = Path(__file__).with_name("snapshot_writer.py")


def write(files: SnapshotFiles, content: bytes, *, step: int, generation: int = 1) -> int:
    files.reserve(len(content))
    index = files.next_index()
    files.reserve(len(content), only=index)
    files.void(index)
    files.buffer(index)[: len(content)] = content
    files.publish(index, step=step, generation=generation, world_size=2, num_bytes=len(content))
    return index


@pytest.fixture
def files(tmp_path: Path) -> SnapshotFiles:
    return SnapshotFiles(tmp_path / "rank-0")


def test_the_last_two_snapshots_are_there_newest_first_for_another_process_too(
    files: SnapshotFiles, tmp_path: Path
) -> None:
    for step in (5, 10, 15):
        write(files, f"step {step}".encode(), step=step)
    reader = SnapshotFiles(tmp_path / "rank-0")
    assert [slot.step for slot in reader.slots()] == [15, 10]
    assert bytes(reader.read(step=15)) == b"step 15" and bytes(reader.read(step=10)) == b"step 10"


def test_nothing_written_is_nothing_there(files: SnapshotFiles) -> None:
    assert files.slots() == ()
    with pytest.raises(CheckpointDamaged, match="no valid memory checkpoint of step 3"):
        files.read(step=3)


def test_a_later_generation_is_newer_also_at_a_lower_step(files: SnapshotFiles) -> None:
    write(files, b"old", step=30)
    write(files, b"new", step=20, generation=2)
    assert [slot.step for slot in files.slots()] == [20, 30]
    write(files, b"newer", step=25, generation=2)
    assert [slot.step for slot in files.slots()] == [25, 20]


def test_while_one_buffer_is_written_the_other_is_valid(files: SnapshotFiles) -> None:
    write(files, b"a", step=1)
    write(files, b"b", step=2)
    files.void(files.next_index())
    assert [slot.step for slot in files.slots()] == [2]


@pytest.mark.parametrize("pinned_step", [1, 2])
def test_a_pinned_buffer_is_not_written_over(pinned_step: int, files: SnapshotFiles) -> None:
    index = {1: write(files, b"a", step=1), 2: write(files, b"b", step=2)}
    files.pin(index[pinned_step])
    for step in (3, 4):
        assert write(files, b"c", step=step) != index[pinned_step]
    assert pinned_step in [slot.step for slot in files.slots()]
    files.pin(None)
    write(files, b"d", step=5)
    assert [slot.step for slot in files.slots()] == [5, 4, 3]


def test_while_a_buffer_is_pinned_the_newest_is_not_written_over_either(files: SnapshotFiles) -> None:
    """Another rank may be done with persisting, and have none of the pinned one's step any more."""
    files.pin(write(files, b"a", step=1))
    for step in range(2, 9):
        write(files, b"b", step=step)
        files.void(files.next_index())
        assert [slot.step for slot in files.slots()] == [step, 1]


def test_without_room_for_another_buffer_only_the_pinned_one_is_spared(
    files: SnapshotFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dougong.run.snapshot.leaves_room", lambda root, num_bytes: len(list(root.iterdir())) < 3)
    write(files, b"a", step=1)
    files.pin(write(files, b"b", step=2))
    for step in (3, 4):
        write(files, b"c", step=step)
        assert [slot.step for slot in files.slots()] == [step, 2]


def test_as_many_snapshots_are_kept_as_asked_for(files: SnapshotFiles) -> None:
    for step in range(1, 9):
        files.reserve(1)
        index = files.next_index(num_kept=2)
        files.reserve(1, only=index)
        files.void(index)
        assert [slot.step for slot in files.slots()][:2] == [number for number in (step - 1, step - 2) if number > 0]
        files.publish(index, step=step, generation=1, world_size=2, num_bytes=1)


def test_what_was_saved_after_the_state_gone_back_to_is_void(files: SnapshotFiles) -> None:
    write(files, b"a", step=5)
    write(files, b"b", step=6)
    files.void_newer(generation=1, step=5)
    write(files, b"c", step=6, generation=2)
    assert [(slot.generation, slot.step) for slot in files.slots()] == [(2, 6), (1, 5)]


@given(sizes=st.lists(st.integers(1, 20000), min_size=1, max_size=8))
@settings(max_examples=30)
def test_a_snapshot_may_grow_and_shrink(sizes: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    prefix = tmp_path_factory.mktemp("s") / "r"
    writer, reader = SnapshotFiles(prefix), SnapshotFiles(prefix)
    for step, size in enumerate(sizes, start=1):
        content = bytes([step]) * size
        write(writer, content, step=step)
        assert bytes(reader.read(step=step)) == content
        assert all(reader.is_whole(slot) for slot in reader.slots())


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_in_a_buffer_is_found(data: st.DataObject, tmp_path: Path) -> None:
    prefix = tmp_path / "r"
    files = SnapshotFiles(prefix)
    index = write(files, b"some state of a rank", step=1)
    offset, bit = data.draw(st.integers(0, 19)), data.draw(st.integers(0, 7))
    files.buffer(index)[offset] ^= 1 << bit
    reader = SnapshotFiles(prefix)
    assert not reader.is_whole(reader.slots()[0])
    with pytest.raises(CheckpointDamaged, match="checksum differs"):
        reader.read(step=1)


@given(data=st.data())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_half_written_slot_is_no_slot(data: st.DataObject, tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path / "r")
    for step in (1, 2):
        write(files, b"x", step=step)
    page = tmp_path / "r.commit"
    content = bytearray(page.read_bytes())
    content[data.draw(st.integers(0, 51))] ^= data.draw(st.integers(1, 255))
    page.write_bytes(content)
    assert [slot.index for slot in files.slots()] == [1]


def test_a_buffer_file_cut_short_is_not_whole_and_does_not_kill(files: SnapshotFiles, tmp_path: Path) -> None:
    write(files, b"x" * 10000, step=1)
    (tmp_path / "rank-0.buf0").write_bytes(b"")
    reader = SnapshotFiles(tmp_path / "rank-0")
    assert not reader.is_whole(reader.slots()[0])
    with pytest.raises(CheckpointDamaged):
        reader.read(step=1)


def test_no_room_is_an_error_that_leaves_the_last_snapshot(files: SnapshotFiles) -> None:
    """A limit on the size of files stands for a full file system: both refuse to allocate."""
    write(files, b"small", step=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            files.reserve(2**24)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert bytes(files.read(step=1)) == b"small"
    write(files, b"goes on", step=2)
    assert bytes(files.read(step=2)) == b"goes on"


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Any:
    mount_point = tmp_path / "small"
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount_point)]
    try:
        mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("a file system can be mounted by root only")
    yield mount_point
    subprocess.run(["umount", "-l", str(mount_point)], check=True)


def test_full_shared_memory_is_not_the_end_of_the_process(small_tmpfs: Path) -> None:
    files = SnapshotFiles(small_tmpfs / "rank-0")
    write(files, b"small", step=1)
    files.reserve(4 * 2**20)
    assert files.is_private
    write(files, b"goes on" * 2**19, step=2)
    assert bytes(files.read(step=2)) == b"goes on" * 2**19


@pytest.mark.processes
def test_killed_at_any_moment_the_newest_or_the_one_before_is_whole(tmp_path: Path) -> None:
    draw = random.Random(4)
    prefix = tmp_path / "rank-0"
    last_step = 0
    for _ in range(12):
        command = [sys.executable, str(WRITER), str(prefix), str(2**20)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            time.sleep(draw.uniform(0.005, 0.05))
            writer.kill()
        files = SnapshotFiles(prefix)
        slots = files.slots()
        assert slots and all(files.is_whole(slot) for slot in slots)
        assert slots[0].step >= last_step
        last_step = slots[0].step
        assert set(files.read(step=last_step)) == {last_step % 251}
    assert last_step > 12


def test_on_full_shared_memory_a_buffer_is_the_process_own_and_found_at_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = os.posix_fallocate

    def full_on_disk(fd: int, offset: int, length: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path)):
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full_on_disk)
    files = SnapshotFiles(tmp_path / "rank-0")
    files.reserve(5000)
    assert files.is_private
    index = files.next_index()
    files.buffer(index)[:5000] = b"x" * 5000
    slot = files.publish(index, step=3, generation=1, world_size=1, num_bytes=5000)
    assert SnapshotFiles(tmp_path / "rank-0").is_whole(slot), "another process finds it"
    assert files.path(index).read_bytes()[:5000] == b"x" * 5000
    monkeypatch.undo()
    later = SnapshotFiles(tmp_path / "rank-0")
    later.reserve(5000)
    assert not later.is_private
    assert not files.path(index).is_symlink()


def test_a_buffer_whose_process_has_ended_is_not_whole(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path / "rank-0")
    files.reserve(5000)
    index = files.next_index()
    slot = files.publish(index, step=3, generation=1, world_size=1, num_bytes=5000)
    files.path(index).unlink()
    files.path(index).symlink_to("/proc/4194304/fd/9")
    assert not SnapshotFiles(tmp_path / "rank-0").is_there(slot)
    assert not SnapshotFiles(tmp_path / "rank-0").is_whole(slot)


def test_what_was_compared_ahead_holds_until_the_buffer_is_void(files: SnapshotFiles, tmp_path: Path) -> None:
    for content, is_whole in ((b"good", True), (b"evil", False)):
        index = write(files, b"good", step=1)
        files.buffer(index)[:4] = content
        reader = SnapshotFiles(tmp_path / "rank-0")
        slot = reader.find(step=1)
        reader.compare_ahead(slot)
        assert reader.is_whole(slot) is is_whole
        files.buffer(index)[:4] = b"evil"
        assert reader.is_whole(slot) is is_whole, "a script that asks twice does not wait twice"
        reader.void(index)
        assert not reader.is_whole(slot), "asked after that, it is compared again"
