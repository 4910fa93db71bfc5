"""The event log: one writer per stream, gapless `seq`, group commit."""

from __future__ import annotations

import fcntl
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from dougong.clock import Clock
from dougong.errors import StoreDamaged, StoreWriteFailed, UserError
from dougong.event.codec import decode, encode
from dougong.event.kinds import AnyEvent, Cause, Recorded, Unknown
from dougong.event.repair import cut_torn_tail, last_line
from dougong.event.segment import first_seq_of, segment_names, stream_names
from dougong.event.store import read
from dougong.event.writer import SegmentWriter, fsync_directory
from dougong.units import MIB

_STREAM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\Z")


class EventLog:
    """The writer of one stream. Threads may share it; a second writer of the same stream is refused.

    An event is *acknowledged* when the commit behind it has returned. Until then it is only buffered: a crash may lose
    it. After a failed commit nothing of it is acknowledged and all of it stays buffered, so that a later commit can
    succeed.
    """

    def __init__(self, directory: Path, *, stream: str, clock: Clock, writer: SegmentWriter, lock_fd: int) -> None:
        """Use `EventLog.open`."""
        self._directory = directory
        self._stream = stream
        self._clock = clock
        self._writer = writer
        self._lock_fd = lock_fd
        self._is_closed = False
        self._buffer: list[tuple[int, bytes]] = []
        self._buffer_lock = threading.Lock()
        self._write_lock = threading.Lock()
        self.repaired_bytes = 0
        """How many bytes of a torn last line were cut at opening; they are kept in `<segment>.torn`."""

    @classmethod
    def open(
        cls, directory: Path, *, stream: str, clock: Clock, segment_max_bytes: int = 64 * MIB, fsync: bool = True
    ) -> EventLog:
        """Open the stream for writing, behind its last whole event; create it if it is not there.

        A segment grows past `segment_max_bytes` only by a single commit that is larger. Without `fsync` a crash of the
        process loses nothing acknowledged, but a crash of the machine may.
        Raises `UserError`: a bad name, a second writer, a directory that cannot be written. Raises `StoreDamaged`: the
        last line is whole and yet not an event.
        """
        if not _STREAM.match(stream):
            mend = "use letters, digits, '.', '_' and '-', beginning with a letter, a digit or '_'"
            raise UserError(f"{stream!r} is not a stream name", where=str(directory), mend=mend)
        folder = directory / stream
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock_fd = _lock(folder)
        except OSError as error:
            raise _cannot_write(folder, error) from error
        try:
            log = cls._opened(
                directory,
                stream=stream,
                clock=clock,
                segment_max_bytes=segment_max_bytes,
                fsync=fsync,
                lock_fd=lock_fd,
            )
        except OSError as error:
            os.close(lock_fd)
            raise _cannot_write(folder, error) from error
        except BaseException:
            os.close(lock_fd)
            raise
        return log

    @property
    def stream(self) -> str:
        """The stream this log writes."""
        return self._stream

    @property
    def last_seq(self) -> int:
        """The `seq` of the last event appended, acknowledged or not; 0 = none."""
        with self._buffer_lock:
            return self._last_seq()

    @property
    def durable_seq(self) -> int:
        """The `seq` of the last event that is safe on disk; 0 = none."""
        return self._writer.durable_seq

    def append(self, event: AnyEvent | Unknown, *, cause: Cause | None = None, time_ns: int | None = None) -> Recorded:
        """Buffer one event for the next commit; the record as it will stand in the log.

        `time_ns` is when it happened, by default now by the wall clock.
        """
        with self._buffer_lock:
            assert not self._is_closed, "append to a closed log"
            at_ns = self._clock.wall_ns() if time_ns is None else time_ns
            seq = self._last_seq() + 1
            recorded = Recorded(stream=self._stream, seq=seq, time_ns=at_ns, event=event, cause=cause)
            self._buffer.append((seq, encode(recorded)))
            return recorded

    def append_many(
        self, events: Iterable[AnyEvent | Unknown], *, cause: Cause | None = None, time_ns: int | None = None
    ) -> tuple[Recorded, ...]:
        """Buffer several events, in this order."""
        return tuple(self.append(event, cause=cause, time_ns=time_ns) for event in events)

    def append_durable(
        self, event: AnyEvent | Unknown, *, cause: Cause | None = None, time_ns: int | None = None
    ) -> Recorded:
        """Append one event and return when it is acknowledged; threads that do so at once share a commit.

        Raises `StoreWriteFailed`.
        """
        recorded = self.append(event, cause=cause, time_ns=time_ns)
        self._commit_up_to(recorded.seq)
        return recorded

    def commit(self) -> None:
        """Acknowledge everything appended so far: it is on disk when this returns. Raises `StoreWriteFailed`."""
        self._commit_up_to(self.last_seq)

    def streams(self) -> tuple[str, ...]:
        """All streams of the directory, this one among them."""
        return stream_names(self._directory)

    def read(
        self, *, streams: Iterable[str] | None = None, after: Mapping[str, int] | None = None
    ) -> Iterator[Recorded]:
        """What is in the log, of all writers, in the one order: see `dougong.event.store.read`."""
        return read(self._directory, streams=streams, after=after)

    def close(self) -> None:
        """Commit, and let another writer take the stream. Raises `StoreWriteFailed`, and is closed nevertheless."""
        if self._is_closed:
            return
        try:
            self.commit()
        finally:
            with self._write_lock, self._buffer_lock:
                self._is_closed = True
                self._writer.close()
                os.close(self._lock_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @classmethod
    def _opened(
        cls, directory: Path, *, stream: str, clock: Clock, segment_max_bytes: int, fsync: bool, lock_fd: int
    ) -> EventLog:
        folder = directory / stream
        names = segment_names(folder)
        repaired_bytes = cut_torn_tail(folder / names[-1], fsync=fsync) if names else 0
        last_seq = _last_seq_of(folder / names[-1]) if names else 0
        writer = SegmentWriter(folder, last_seq=last_seq, segment_max_bytes=segment_max_bytes, fsync=fsync)
        writer.open_segment(first_seq_of(names[-1]) if names else 1)
        if fsync:
            fsync_directory(directory)
        log = cls(directory, stream=stream, clock=clock, writer=writer, lock_fd=lock_fd)
        log.repaired_bytes = repaired_bytes
        return log

    def _last_seq(self) -> int:
        return self._buffer[-1][0] if self._buffer else self._writer.durable_seq

    def _commit_up_to(self, seq: int) -> None:
        # Whoever holds the write lock commits for all who wait for it: they then find their `seq` durable already.
        with self._write_lock:
            if self._writer.durable_seq >= seq:
                return
            assert not self._is_closed, "commit to a closed log"
            batch = self._take_batch()
            try:
                self._writer.write(b"".join(line for _, line in batch), last_seq=batch[-1][0])
            except OSError as error:
                reason = error.strerror or str(error)
                raise StoreWriteFailed(str(self._writer.path), num_events=len(batch), reason=reason) from error
            self._drop_durable()

    def _take_batch(self) -> list[tuple[int, bytes]]:
        self._drop_durable()
        with self._buffer_lock:
            return list(self._buffer)

    def _drop_durable(self) -> None:
        with self._buffer_lock:
            durable_seq = self._writer.durable_seq
            self._buffer = [pending for pending in self._buffer if pending[0] > durable_seq]


def is_being_written(directory: Path, *, stream: str) -> bool:
    """Does a living process hold the stream for writing?"""
    try:
        fd = os.open(directory / stream / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _lock(folder: Path) -> int:
    path = folder / "lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except BlockingIOError as error:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise UserError(
            f"the event stream {folder.name!r} is being written by another process (pid {holder})",
            where=str(folder),
            mend="wait for it or stop it; or choose another run directory",
        ) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _cannot_write(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"events cannot be written: {error.strerror or error}",
        where=str(error.filename or folder),
        mend="make the directory writable, free some space, or choose another run directory",
    )


def _last_seq_of(segment: Path) -> int:
    """The last `seq` of a repaired segment; of an empty one, the last of the segment before it."""
    first_seq = first_seq_of(segment.name)
    line = last_line(segment)
    if not line:
        return first_seq - 1
    try:
        recorded = decode(line)
    except msgspec.DecodeError as error:
        raise StoreDamaged(str(segment), line=_num_lines(segment), reason=f"not an event: {error}") from error
    if recorded.stream != segment.parent.name or recorded.seq < first_seq:
        raise StoreDamaged(str(segment), line=_num_lines(segment), reason="belongs to another stream or segment")
    return recorded.seq


def _num_lines(segment: Path) -> int:
    with segment.open("rb") as file:
        return sum(1 for _ in file)
