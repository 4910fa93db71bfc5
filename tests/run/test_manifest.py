from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dougong.errors import CheckpointDamaged, UserError
from dougong.run import layout, manifest
from dougong.run.checkpoints import newest_good
from dougong.run.manifest import FsspecPlace, Stored, beyond_retention, list_stored, verify
from dougong.run.retention_lock import Moment
from tests.run.made_checkpoint import CONTENTS, flip, make, write_files

NOW = Moment(wall_ns=2 * 10**18, boot_id="b", boot_ns=10**15)
NAMES = [*CONTENTS, "manifest.json", "COMMIT"]


def damage_of(root: Path, directory: Path) -> CheckpointDamaged:
    with pytest.raises(CheckpointDamaged) as caught:
        verify(str(root), directory.name)
    return caught.value


def test_a_committed_checkpoint_verifies_and_tells_what_it_holds(tmp_path: Path) -> None:
    directory = make(tmp_path, step=100, generation=3)
    assert directory.name == "step-000000100-g003"
    found = verify(str(tmp_path), directory.name)
    assert (found.step, found.generation) == (100, 3)
    assert found.num_bytes == sum(map(len, CONTENTS.values()))


def test_every_byte_is_read(tmp_path: Path) -> None:
    directory = make(tmp_path, step=1)
    told: list[int] = []
    found = verify(str(tmp_path), directory.name, on_read=told.append)
    assert sum(told) == found.num_bytes


@given(data=st.data())
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_flipped_bit_anywhere_is_found(data: st.DataObject, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "c", ignore_errors=True)
    directory = make(tmp_path / "c", step=1)
    victim = directory / data.draw(st.sampled_from(NAMES))
    flip(
        victim,
        offset_bytes=data.draw(st.integers(0, victim.stat().st_size - 1)),
        bit=data.draw(st.integers(0, 7)),
    )
    assert damage_of(tmp_path / "c", directory).reason


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("harm", ["cut", "grown", "emptied", "missing"])
def test_a_torn_or_missing_file_is_found_and_named(name: str, harm: str, tmp_path: Path) -> None:
    directory = make(tmp_path, step=1)
    victim = directory / name
    whole = victim.read_bytes()
    match harm:
        case "cut":
            victim.write_bytes(whole[:-1])
        case "grown":
            victim.write_bytes(whole + b"x")
        case "emptied":
            victim.write_bytes(b"")
        case _:
            victim.unlink()
    damage = damage_of(tmp_path, directory)
    if name in CONTENTS:
        assert damage.path.endswith(name)


def test_an_uncommitted_checkpoint_is_listed_but_never_chosen(tmp_path: Path) -> None:
    make(tmp_path, step=50)
    make(tmp_path, step=100, is_committed=False)
    assert [(item.step, item.is_committed) for item in list_stored(str(tmp_path))] == [(100, False), (50, True)]
    chosen, rejected = newest_good(str(tmp_path))
    assert chosen == (50, "step-000000050-g001")
    assert [(event.step, event.reason) for event in rejected] == [(100, "it was never committed (no COMMIT mark)")]


def test_the_newest_good_one_is_chosen_and_the_damaged_told(tmp_path: Path) -> None:
    make(tmp_path, step=50)
    flip(make(tmp_path, step=100) / "__0_0.distcp", offset_bytes=9)
    (make(tmp_path, step=150) / "rank-0.state").unlink()
    chosen, rejected = newest_good(str(tmp_path))
    assert chosen == (50, "step-000000050-g001")
    assert [event.step for event in rejected] == [150, 100]
    assert [event.reason for event in rejected] == [
        "the file is missing",
        "checksum differs from what was written (xxh3-128)",
    ]


def test_nothing_stored_is_nothing_chosen(tmp_path: Path) -> None:
    assert newest_good(str(tmp_path / "absent")) == (None, ())


def test_what_is_no_checkpoint_directory_is_not_listed(tmp_path: Path) -> None:
    for name in ("step-1", "step-x-g001", "step-000000001-x001", "step-1-g1-2", "other", "step-1-g"):
        (tmp_path / name).mkdir()
    (tmp_path / "latest.txt").write_text("")
    assert list_stored(str(tmp_path)) == ()


class _Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("moment", range(9))
def test_killed_at_any_moment_of_a_commit_the_checkpoint_is_whole_or_does_not_exist(
    moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit makes nine calls that change the disk or make it safe; the process dies before one of them."""
    record = write_files(tmp_path, step=10)
    calls: list[str] = []

    def dying(name: str) -> Any:
        real = getattr(layout.os, name)

        def call(*arguments: Any, **rest: Any) -> Any:
            if name == "open" and not arguments[1] & layout.os.O_CREAT:
                return real(*arguments, **rest)
            if len(calls) == moment:
                raise _Killed
            calls.append(name)
            return real(*arguments, **rest)

        return call

    for name in ("open", "write", "fsync", "replace"):
        monkeypatch.setattr(layout.os, name, dying(name))
    with pytest.raises(_Killed):
        manifest.commit(str(tmp_path), record)
    monkeypatch.undo()

    (stored,) = list_stored(str(tmp_path))
    if stored.is_committed:
        verify(str(tmp_path), stored.directory)
    else:
        assert newest_good(str(tmp_path))[0] is None
    assert stored.is_committed is (calls.count("replace") == 2)


@pytest.mark.parametrize("harm", ["missing", "short", "no directory"])
def test_nothing_is_committed_over_what_is_not_there(harm: str, tmp_path: Path) -> None:
    """As when an old letter is told again after retention deleted the checkpoint."""
    record = write_files(tmp_path, step=10)
    directory = tmp_path / "step-000000010-g001"
    match harm:
        case "missing":
            (directory / "__0_0.distcp").unlink()
        case "short":
            (directory / "__0_0.distcp").write_bytes(b"")
        case _:
            shutil.rmtree(directory)
    with pytest.raises(CheckpointDamaged):
        manifest.commit(str(tmp_path), record)
    assert not (directory / "COMMIT").exists()


def test_files_are_read_in_several_threads_and_the_first_damage_in_order_is_told(tmp_path: Path) -> None:
    directory = make(tmp_path, step=1)
    for name in ("rank-0.state", "__0_0.distcp"):
        flip(directory / name, offset_bytes=1)
    seen: set[int] = set()
    with pytest.raises(CheckpointDamaged):
        verify(str(tmp_path), directory.name, on_read=lambda _: seen.add(threading.get_ident()))
    assert len(seen) >= 1


def test_a_commit_can_be_done_again_after_a_crash(tmp_path: Path) -> None:
    record = write_files(tmp_path, step=10)
    manifest.commit(str(tmp_path), record)
    manifest.commit(str(tmp_path), record)
    assert newest_good(str(tmp_path))[0] == (10, "step-000000010-g001")


@pytest.mark.parametrize("name", ["../secret", "a/b", ".", "..", "/etc/hostname"])
def test_a_manifest_that_names_a_file_outside_is_refused(name: str, tmp_path: Path) -> None:
    record = write_files(tmp_path, step=1)
    outside = msgspec.structs.replace(record, files=(manifest.FileRecord(name, 3, "0"),))
    with pytest.raises(CheckpointDamaged, match="outside"):
        manifest.commit(str(tmp_path), outside)
    content = msgspec.json.encode(outside)
    (tmp_path / "step-000000001-g001" / "manifest.json").write_bytes(content)
    (tmp_path / "step-000000001-g001" / "COMMIT").write_text(xxhash.xxh3_128_hexdigest(content))
    assert "outside" in damage_of(tmp_path, tmp_path / "step-000000001-g001").reason


def test_another_format_version_is_refused_by_name(tmp_path: Path) -> None:
    record = msgspec.structs.replace(write_files(tmp_path, step=1), format_version=99)
    manifest.commit(str(tmp_path), record)
    assert "format version 99" in damage_of(tmp_path, tmp_path / "step-000000001-g001").reason


# --- retention ---


def stored(step: int, *, generation: int = 1, **marks: Any) -> Stored:
    name = manifest.directory_name(step, generation=generation)
    return Stored(directory=name, step=step, generation=generation, **{"is_committed": True, **marks})


def deleted(*items: Stored, keep: int) -> list[tuple[int, int]]:
    listed = tuple(sorted(items, key=lambda item: (item.step, item.generation), reverse=True))
    return sorted((item.step, item.generation) for item in beyond_retention(listed, keep=keep))


def test_the_newest_are_kept_and_the_others_go() -> None:
    assert deleted(*(stored(step) for step in (10, 20, 30, 40)), keep=2) == [(10, 1), (20, 1)]


def test_leftovers_of_a_crash_go_but_not_what_is_being_written() -> None:
    torn, being_written = stored(15, is_committed=False), stored(30, is_committed=False)
    assert deleted(stored(10), torn, stored(20), being_written, keep=2) == [(15, 1)]


def test_a_damaged_one_is_not_counted_among_the_kept() -> None:
    assert deleted(stored(10), stored(20, is_rejected=True), stored(30), keep=2) == [(20, 1)]


def test_what_was_just_written_stays_although_a_higher_step_of_before_could_not_be_read() -> None:
    assert deleted(stored(150, generation=1), stored(120, generation=2), keep=1) == [(150, 1)]


def test_without_a_good_one_nothing_is_deleted() -> None:
    assert deleted(stored(10, is_committed=False), stored(20, is_rejected=True), keep=1) == []


STORED = st.lists(
    st.builds(
        stored,
        st.integers(1, 9),
        generation=st.integers(1, 4),
        is_committed=st.booleans(),
        is_rejected=st.booleans(),
    ),
    unique_by=lambda item: (item.step, item.generation),
    max_size=12,
)


@given(STORED, st.integers(1, 4))
def test_retention_keeps_so_many_good_ones_the_last_written_among_them(items: list[Stored], keep: int) -> None:
    good = [item for item in items if item.is_committed and not item.is_rejected]
    listed = tuple(sorted(items, key=lambda item: (item.step, item.generation), reverse=True))
    gone = beyond_retention(listed, keep=keep)
    left = [item for item in good if item not in gone]
    assert len(left) == min(keep, len(good))
    assert len(set(gone)) == len(gone)
    if good:
        assert max(good, key=lambda item: (item.generation, item.step)) in left
        assert beyond_retention(tuple(item for item in listed if item not in gone), keep=keep) == ()


def test_a_deletion_that_dies_after_its_first_step_leaves_no_false_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, step=10)

    def die(*_: object) -> None:
        raise _Killed

    monkeypatch.setattr(manifest.LocalPlace, "remove_tree", die)
    with pytest.raises(_Killed):
        manifest.delete(str(tmp_path), "step-000000010-g001", moment=NOW)
    assert [item.is_committed for item in list_stored(str(tmp_path))] == [False]


def test_a_deleted_one_is_gone(tmp_path: Path) -> None:
    make(tmp_path, step=10)
    manifest.delete(str(tmp_path), "step-000000010-g001", moment=NOW)
    assert list(tmp_path.iterdir()) == []


# --- other places ---


def test_a_file_url_is_the_path_itself(tmp_path: Path) -> None:
    make(tmp_path, step=7)
    assert newest_good(f"file://{tmp_path}")[0] == (7, "step-000000007-g001")


def test_a_protocol_that_nobody_knows_is_the_users_mistake() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(UserError) as caught:
        list_stored("nosuch://bucket/checkpoints")
    assert "nosuch" in caught.value.what


def test_commit_verify_list_and_delete_in_an_object_store() -> None:
    pytest.importorskip("fsspec")
    url = "memory://manifest-test"
    place, root = manifest.storage_at(url)
    assert list_stored(url) == ()
    for step in (10, 20):
        base = f"{root}/{manifest.directory_name(step, generation=1)}"
        place.make_directory(base)
        place.write(f"{base}/a.bin", b"abc")
        record = manifest.FileRecord("a.bin", 3, xxhash.xxh3_128_hexdigest(b"abc"))
        manifest.commit(
            url,
            manifest.Manifest(
                format_version=1, run_id="r", step=step, generation=1, world_size=1, time_ns=0, files=(record,)
            ),
        )
    assert newest_good(url)[0] == (20, "step-000000020-g001")
    place.write(f"{root}/step-000000020-g001/a.bin", b"abd")
    assert newest_good(url)[0] == (10, "step-000000010-g001")
    for item in list_stored(url):
        manifest.delete(url, item.directory, moment=NOW)
    assert list_stored(url) == ()


def test_a_cached_listing_of_an_object_store_does_not_hide_what_another_process_wrote(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")

    class Caching(fsspec.get_filesystem_class("file")):  # type: ignore[misc]
        """Caches listings, as the file systems of object stores do."""

        cachable = False

        def ls(self, path: str, detail: bool = False, **rest: Any) -> Any:
            if path not in self.dircache:
                self.dircache[path] = super().ls(path, detail=True, **rest)
            return self.dircache[path] if detail else [entry["name"] for entry in self.dircache[path]]

        def invalidate_cache(self, path: str | None = None) -> None:
            self.dircache.clear()

    place = FsspecPlace(Caching(skip_instance_cache=True))
    (tmp_path / "a").write_text("")
    assert place.names(str(tmp_path)) == ("a",)
    (tmp_path / "COMMIT").write_text("")
    assert place.names(str(tmp_path)) == ("COMMIT", "a")
