from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dougong.run import new_file as module
from dougong.run.manifest import FileRecord, FsspecPlace, LocalPlace
from dougong.run.new_file import DirectFile, Pace, new_file


def pages(content: bytes) -> memoryview:
    """The content in memory that begins on a page."""
    mapping = mmap.mmap(-1, max(1, len(content)))
    mapping[: len(content)] = content
    return memoryview(mapping)[: len(content)]


def write(path: Path, parts: list[tuple[bytes, bool]], *, num_bytes: int | None = None) -> FileRecord:
    whole = b"".join(part for part, _ in parts)
    file = DirectFile(str(path), num_bytes=len(whole) if num_bytes is None else num_bytes, on_chunk=lambda _: None)
    for part, is_on_page in parts:
        file.write(pages(part) if is_on_page else memoryview(part), is_on_page=is_on_page)
    return file.finish()


SIZES = st.one_of(
    st.integers(0, 9000), st.sampled_from([4096, 8192, 65536, 65537, 69632, 8 * 2**20, 8 * 2**20 + 4096, 9 * 2**20 + 5])
)


@given(parts=st.lists(st.tuples(SIZES, st.booleans()), max_size=6))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_parts_stand_in_the_file_as_given_with_size_and_checksum(
    parts: list[tuple[int, bool]], tmp_path: Path
) -> None:
    given_parts = [(os.urandom(size), is_on_page) for size, is_on_page in parts]
    whole = b"".join(part for part, _ in given_parts)
    path = tmp_path / "f"
    path.unlink(missing_ok=True)
    record = write(path, given_parts)
    assert path.read_bytes() == whole
    assert record == FileRecord("f", len(whole), xxhash.xxh3_128_hexdigest(whole))


def test_what_lies_on_a_page_goes_to_the_disk_as_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy of the bulk: the very memory that was given is what is written."""
    content = pages(os.urandom(3 * 2**20))
    written: list[int] = []
    real = os.pwritev

    def pwritev(fd: int, parts: list[memoryview], offset: int) -> int:
        written.extend(len(part) for part in parts if part.obj is content.obj)
        return real(fd, parts, offset)

    monkeypatch.setattr(module.os, "pwritev", pwritev)
    file = DirectFile(str(tmp_path / "f"), num_bytes=4096 + len(content), on_chunk=lambda _: None)
    file.write(memoryview(bytes(4096)))
    file.write(content, is_on_page=True)
    file.finish()
    assert sum(written) == len(content)


def test_a_file_system_that_refuses_direct_writes_gets_ordinary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev
    refusals: list[int] = []

    def pwritev(fd: int, parts: list[memoryview], offset: int) -> int:
        if module.fcntl.fcntl(fd, module.fcntl.F_GETFL) & os.O_DIRECT:
            refusals.append(len(parts))
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, parts, offset)

    monkeypatch.setattr(module.os, "pwritev", pwritev)
    content = os.urandom(200_001)
    write(tmp_path / "f", [(content, True)])
    assert len(refusals) == 1
    assert (tmp_path / "f").read_bytes() == content


def test_a_write_that_takes_only_a_part_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def pwritev(fd: int, parts: list[memoryview], offset: int) -> int:
        whole = b"".join(parts)
        return real(fd, [pages(whole[: max(4096, len(whole) // 2 // 4096 * 4096)])], offset)

    monkeypatch.setattr(module.os, "pwritev", pwritev)
    content = os.urandom(300_000)
    write(tmp_path / "f", [(bytes(8192), False), (content, True), (b"end", False)])
    assert (tmp_path / "f").read_bytes() == bytes(8192) + content + b"end"


def test_shared_memory_takes_files_too(tmp_path: Path) -> None:
    path = Path("/dev/shm") / f"dougong-test-{os.getpid()}"
    try:
        content = os.urandom(100_000)
        write(path, [(content, True), (b"end", False)])
        assert path.read_bytes() == content + b"end"
    finally:
        path.unlink(missing_ok=True)


def test_a_file_is_never_written_twice(tmp_path: Path) -> None:
    write(tmp_path / "f", [(b"first", False)])
    with pytest.raises(FileExistsError):
        write(tmp_path / "f", [(b"second", False)])
    assert (tmp_path / "f").read_bytes() == b"first"


def test_room_that_is_not_there_is_known_before_the_first_byte(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"space|large|quota") as caught:
        write(tmp_path / "f", [(b"x", False)], num_bytes=2**50)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
    assert not (tmp_path / "f").exists()


def test_a_discarded_file_leaves_nothing(tmp_path: Path) -> None:
    file = DirectFile(str(tmp_path / "f"), num_bytes=10, on_chunk=lambda _: None)
    file.write(memoryview(b"12345"))
    file.discard()
    assert list(tmp_path.iterdir()) == []


def test_an_upload_has_the_same_record_as_a_local_file(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    content = os.urandom(100_000)
    records: list[FileRecord] = []
    for name, place in (("local", LocalPlace()), ("uploaded", FsspecPlace(fsspec.filesystem("file")))):
        (tmp_path / name).mkdir()
        file = new_file(place, f"{tmp_path}/{name}/f", num_bytes=len(content), on_chunk=lambda _: None)
        file.write(memoryview(content))
        records.append(file.finish())
        assert (tmp_path / name / "f").read_bytes() == content
    assert records[0] == records[1]


def test_the_pace_is_shared_and_never_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = [0]
    monkeypatch.setattr(module.time, "monotonic_ns", lambda: now_ns[0])

    def sleep(duration_s: float) -> None:
        now_ns[0] += round(duration_s * 1e9)

    monkeypatch.setattr(module.time, "sleep", sleep)
    pace = Pace(1000.0)
    for _ in range(11):
        pace.spend(500)
    assert now_ns[0] / 1e9 == pytest.approx(10 * 0.5)


def test_without_a_cap_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda _: pytest.fail("it waited"))
    Pace(0.0).spend(10**12)
