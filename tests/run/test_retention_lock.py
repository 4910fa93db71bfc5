from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dougong.errors import CheckpointLocked, UserError
from dougong.run import manifest, retention_lock
from dougong.run.retention_lock import Evidence, Moment, RetentionLock, why_locked
from tests.run.made_checkpoint import write_files

S = 10**9
KEY = b"k" * 32
DIRECTORY = "step-000000010-g001"
WHOLE = Evidence(is_as_committed=True, changed_ns=None)


def moment(wall_s: float, *, boot_s: float | None = None, boot_id: str = "boot-1") -> Moment:
    return Moment(wall_ns=round(wall_s * S), boot_id=boot_id, boot_ns=round((wall_s if boot_s is None else boot_s) * S))


SINCE = moment(1000.0, boot_s=50.0)


def lock(lock_s: float = 100.0) -> RetentionLock:
    return RetentionLock(lock_s=lock_s, since=SINCE)


def test_it_holds_until_its_time_and_not_longer() -> None:
    assert "another 1 s" in why_locked(lock(), WHOLE, moment(1099.0, boot_s=149.0))
    assert why_locked(lock(), WHOLE, moment(1100.0, boot_s=150.0)) == ""


@given(jump_s=st.floats(0, 1e9))
def test_a_clock_set_forward_on_the_same_boot_opens_nothing(jump_s: float) -> None:
    assert why_locked(lock(), WHOLE, moment(1001.0 + jump_s, boot_s=51.0))


@given(jump_s=st.floats(0, 1e6), passed_s=st.floats(0, 1e6))
def test_a_clock_set_back_only_makes_it_longer(jump_s: float, passed_s: float) -> None:
    back = why_locked(lock(), WHOLE, moment(1000.0 + passed_s - jump_s, boot_s=50.0 + passed_s))
    straight = why_locked(lock(), WHOLE, moment(1000.0 + passed_s, boot_s=50.0 + passed_s))
    assert back or not straight


def test_after_a_reboot_the_wall_clock_is_believed() -> None:
    assert why_locked(lock(), WHOLE, moment(1099.0, boot_s=3.0, boot_id="boot-2"))
    assert why_locked(lock(), WHOLE, moment(1101.0, boot_s=3.0, boot_id="boot-2")) == ""


def test_a_manifest_that_was_touched_later_does_not_open_by_time() -> None:
    late = Evidence(is_as_committed=True, changed_ns=round(5000 * S))
    assert "changed or copied" in why_locked(lock(), late, moment(9000.0, boot_s=8000.0))
    checked = msgspec.structs.replace(late, is_seal_right=True)
    assert why_locked(lock(), checked, moment(9000.0, boot_s=8000.0)) == ""


# --- on disk ---


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A place for checkpoints whose locks are taken off at the end, so that the test leaves nothing behind."""
    yield tmp_path
    for directory in tmp_path.glob("step-*"):
        retention_lock.unprotect(directory)
        for path in directory.iterdir():
            path.chmod(0o644)


def make(root: Path, *, lock_s: float = 100.0, key: bytes | None = KEY, since: Moment | None = None) -> Path:
    record = write_files(root, step=10)
    now_ns = os.stat(root / DIRECTORY).st_mtime_ns
    began = since or Moment(wall_ns=now_ns, boot_id="b", boot_ns=0)
    manifest.commit(str(root), record, lock_s=lock_s, lock_key=key, since=began)
    return root / DIRECTORY


def later(directory: Path, after_s: float) -> Moment:
    began = manifest.read_manifest(str(directory.parent), DIRECTORY).lock
    assert began is not None
    return Moment(
        wall_ns=began.since.wall_ns + round(after_s * S), boot_id="b", boot_ns=began.since.boot_ns + round(after_s * S)
    )


def test_a_locked_checkpoint_is_not_deleted_before_its_time(root: Path) -> None:
    directory = make(root)
    with pytest.raises(CheckpointLocked, match="locked for another"):
        manifest.delete(str(root), DIRECTORY, moment=later(directory, 99.0))
    manifest.verify(str(root), DIRECTORY)
    manifest.delete(str(root), DIRECTORY, moment=later(directory, 101.0))
    assert not directory.exists()


def test_its_files_and_its_directory_are_read_only(root: Path) -> None:
    directory = make(root)
    assert directory.stat().st_mode & 0o777 == 0o555
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o444}


def test_the_owners_key_opens_it_and_anybody_can_see_that_it_did(root: Path) -> None:
    directory = make(root)
    manifest.unlock(str(root), DIRECTORY, key=KEY)
    assert directory.stat().st_mode & 0o777 == 0o555
    manifest.delete(str(root), DIRECTORY, moment=later(directory, 0.0))


@pytest.mark.parametrize("key", [b"x" * 32, b""])
def test_another_key_does_not(key: bytes, root: Path) -> None:
    directory = make(root)
    with pytest.raises(UserError, match="another owner's key"):
        manifest.unlock(str(root), DIRECTORY, key=key)
    assert manifest.why_locked(str(root), DIRECTORY, moment=later(directory, 0.0))


def test_a_made_up_word_does_not(root: Path) -> None:
    directory = make(root)
    retention_lock.set_open(directory, is_open=True)
    for word in ("", "00" * 32, "no hexadecimal"):
        (directory / "UNLOCKED").write_text(word)
        assert manifest.why_locked(str(root), DIRECTORY, moment=later(directory, 0.0))


def test_without_an_owner_only_time_opens_it(root: Path) -> None:
    directory = make(root, key=None)
    with pytest.raises(UserError, match="only time"):
        manifest.unlock(str(root), DIRECTORY, key=KEY)
    assert manifest.why_locked(str(root), DIRECTORY, moment=later(directory, 101.0)) == ""


def rewrite(directory: Path, **changes: object) -> None:
    """Edit the lock record and make the COMMIT mark fit, as a careful intruder would."""
    retention_lock.unprotect(directory)
    path = directory / "manifest.json"
    document = json.loads(path.read_bytes())
    document["lock"] = {**document["lock"], **changes} if changes else None
    content = json.dumps(document).encode()
    path.chmod(0o644)
    (directory / "COMMIT").chmod(0o644)
    path.write_bytes(content)
    (directory / "COMMIT").write_text(xxhash.xxh3_128_hexdigest(content))


def test_a_record_edited_to_an_earlier_time_is_refused_even_when_that_time_is_over(root: Path) -> None:
    directory = make(root)
    moment_after = later(directory, 50.0)
    rewrite(directory, lock_s=10.0)
    reason = manifest.why_locked(str(root), DIRECTORY, moment=moment_after, key=KEY)
    assert "not the one that was committed" in reason
    with pytest.raises(CheckpointLocked):
        manifest.delete(str(root), DIRECTORY, moment=moment_after, key=KEY)
    manifest.unlock(str(root), DIRECTORY, key=KEY)
    assert manifest.why_locked(str(root), DIRECTORY, moment=moment_after) == ""


def test_an_edit_that_leaves_the_mark_as_it_was_is_noticed_without_any_key(root: Path) -> None:
    directory = make(root, key=None)
    after = later(directory, 50.0)
    mark = (directory / "COMMIT").read_text()
    rewrite(directory, lock_s=10.0)
    (directory / "COMMIT").write_text(mark)
    assert "not the one that was committed" in manifest.why_locked(str(root), DIRECTORY, moment=after)


def test_an_edit_long_after_the_commit_is_noticed_without_the_key_by_the_time_of_the_edit(root: Path) -> None:
    long_ago = Moment(wall_ns=os.stat(root).st_mtime_ns - 1000 * S, boot_id="b", boot_ns=0)
    directory = make(root, since=long_ago)
    rewrite(directory, lock_s=10.0)
    assert "changed or copied" in manifest.why_locked(str(root), DIRECTORY, moment=later(directory, 5000.0))


def test_a_manifest_made_unreadable_does_not_open_the_lock(root: Path) -> None:
    directory = make(root)
    after = later(directory, 0.0)
    rewrite(directory, lock_s=10.0)
    (directory / "manifest.json").write_bytes(b"garbage")
    directory.chmod(0o555)
    assert "read-only" in manifest.why_locked(str(root), DIRECTORY, moment=after)


def test_a_damage_can_still_be_marked_and_the_lock_holds(root: Path) -> None:
    directory = make(root)
    manifest.reject(str(root), DIRECTORY, reason="a byte is wrong")
    assert (directory / "REJECTED").read_text() == "a byte is wrong"
    assert directory.stat().st_mode & 0o777 == 0o555
    assert manifest.why_locked(str(root), DIRECTORY, moment=later(directory, 1.0))


def test_a_checkpoint_without_a_lock_is_not_read_only(root: Path) -> None:
    manifest.commit(str(root), write_files(root, step=10))
    assert (root / DIRECTORY).stat().st_mode & 0o200
    assert manifest.why_locked(str(root), DIRECTORY, moment=moment(0.0)) == ""
    with pytest.raises(UserError, match="not locked"):
        manifest.unlock(str(root), DIRECTORY, key=KEY)
