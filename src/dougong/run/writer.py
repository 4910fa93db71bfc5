"""The writer of a node: a process without torch that puts the ranks' checkpoint files on storage.

It lives as long as its agent. Its stdin brings the paths of orders, one JSON line each; what becomes of an order is
told in letters, to the rank and, through the agent, to the controller. When stdin closes (the agent is gone) it
finishes what it has and ends. An order that a killed writer left is given up by the next one, its files are removed.

It gives way to training: low priority for CPU and disk, and a rate cap if one is set.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from dougong.errors import DougongError
from dougong.run import manifest
from dougong.run.layout import NodeDirectory
from dougong.run.letters import Letter, MetadataWritten, OrderDone, ShardFailed, ShardWritten, StorageCause, post
from dougong.run.manifest import FileRecord
from dougong.run.new_file import Pace
from dougong.run.sealed import Sealer, load_sealer
from dougong.run.storage_alarm import cause_of
from dougong.run.write_files import mapped, write_files
from dougong.run.write_order import WriteOrder, is_begun, mark_begun, orders_in, read_order, take_order

_NUM_THREADS = 64
"""As many as a node has ranks: an order that nobody begins is given up by its rank."""
_NICE = 10
_SIGN_S = 1.0
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_BEST_EFFORT_LOWEST = (2 << 13) | 7  # linux/ioprio.h; the idle class could starve a save for ever


class WriterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a writer is started with: one JSON argument."""

    node_root: str
    write_bytes_per_s: float
    checkpoint_key: str
    """The file of the key for encryption; "" = none."""


class OrderLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line on the writer's stdin."""

    path: str


class TakenBack(Exception):
    """The rank does not want this order carried out any more."""


def main() -> None:
    """Serve until stdin closes."""
    # a Ctrl-C at the terminal is for the launcher; the last checkpoint is still to be written
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settings = msgspec.json.decode(sys.argv[1], type=WriterSettings)
    _give_way()
    writer = Writer(settings)
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="dougong-write") as threads:
        for path in writer.take_over():
            threads.submit(writer.serve, path)
        for line in sys.stdin.buffer:
            order = msgspec.json.decode(line, type=OrderLine)
            threads.submit(writer.serve, Path(order.path))


class Writer:
    """Carries out the orders of one node."""

    def __init__(self, settings: WriterSettings) -> None:
        self._settings = settings
        self._node = NodeDirectory(Path(settings.node_root))
        self._pace = Pace(settings.write_bytes_per_s)

    def take_over(self) -> tuple[Path, ...]:
        """The orders that wait to be carried out. One that was begun and that nobody works on was left by a writer that
        was killed: it is given up."""
        waiting: list[Path] = []
        for path in orders_in(self._node):
            fd = take_order(path)
            if fd is None:
                continue
            try:
                if is_begun(fd):
                    self._give_up(path, read_order(fd))
                else:
                    waiting.append(path)
            except msgspec.MsgspecError:
                path.unlink(missing_ok=True)
            finally:
                os.close(fd)
        return tuple(waiting)

    def serve(self, path: Path) -> None:
        """Carry out the order at `path`, if it is still wanted."""
        fd = take_order(path)
        if fd is None:
            return
        try:
            mark_begun(fd)
            self._serve_taken(read_order(fd), path, fd)
        except msgspec.MsgspecError:
            path.unlink(missing_ok=True)
        finally:
            os.close(fd)

    def _serve_taken(self, order: WriteOrder, path: Path, fd: int) -> None:
        began_ns = time.monotonic_ns()
        try:
            files = self._carry_out(order, path, fd)
            # from here on the files are the controller's: another writer must not find the order and remove them
            path.unlink(missing_ok=True)
            self._say_written(order, files, write_s=(time.monotonic_ns() - began_ns) / 1e9)
        except TakenBack:
            return
        except Exception as error:  # the edge of a thread: it goes to the rank and to the event log
            path.unlink(missing_ok=True)
            self._say_failed(order, _in_words(error), cause_of(error))

    def _give_up(self, path: Path, order: WriteOrder) -> None:
        _remove_files(order)
        path.unlink(missing_ok=True)
        self._say_failed(order, "the node's writer was killed while it wrote", "other")

    def _carry_out(self, order: WriteOrder, path: Path, fd: int) -> tuple[FileRecord, ...]:
        place, root = manifest.storage_at(order.checkpoint_url)
        sign_ns = 0

        def on_chunk(num_bytes: int) -> None:
            nonlocal sign_ns
            if not path.exists():
                raise TakenBack
            if time.monotonic_ns() - sign_ns > _SIGN_S * 1e9:
                os.utime(fd)
                sign_ns = time.monotonic_ns()
            self._pace.spend(num_bytes)

        with mapped(order.buffer_path) as buffer:
            return write_files(
                order.files,
                buffer,
                place=place,
                directory=f"{root}/{order.directory}",
                on_chunk=on_chunk,
                sealer=self._sealer(),
            )

    def _sealer(self) -> Sealer | None:
        """Read anew each time: the key is not kept longer than it is used."""
        return load_sealer(self._settings.checkpoint_key) if self._settings.checkpoint_key else None

    def _say_written(self, order: WriteOrder, files: tuple[FileRecord, ...], *, write_s: float) -> None:
        """The rank hears how fast the storage was, the controller when all was done since it was asked for."""
        if order.kind == "shard":
            told = ShardWritten(
                generation=order.generation,
                rank=order.rank,
                step=order.step,
                directory=order.directory,
                files=files,
                items=order.items,
                stall_s=order.stall_s,
                write_s=(time.monotonic_ns() - order.asked_ns) / 1e9,
            )
        else:
            told = MetadataWritten(generation=order.generation, rank=order.rank, step=order.step, file=files[0])
        self._post(told, self._node.outbox(order.rank))
        self._say_done(order, write_s=write_s, reason="")

    def _say_failed(self, order: WriteOrder, reason: str, cause: StorageCause) -> None:
        told = ShardFailed(generation=order.generation, rank=order.rank, step=order.step, reason=reason, cause=cause)
        self._post(told, self._node.outbox(order.rank))
        self._say_done(order, write_s=0.0, reason=reason)

    def _say_done(self, order: WriteOrder, *, write_s: float, reason: str) -> None:
        done = OrderDone(
            generation=order.generation,
            rank=order.rank,
            order=order.kind,
            step=order.step,
            write_s=write_s,
            reason=reason,
        )
        self._post(done, self._node.inbox(order.rank))

    def _post(self, letter: Letter, box: Path) -> None:
        """The boxes of a run that is over are gone, and must not come back; a full shared memory takes no letter."""
        if self._node.root.is_dir():
            with contextlib.suppress(OSError):
                post(box, letter)


def _remove_files(order: WriteOrder) -> None:
    """They were never told to the controller, so no checkpoint rests on them."""
    with contextlib.suppress(OSError, DougongError):
        place, root = manifest.storage_at(order.checkpoint_url)
        for name in place.names(f"{root}/{order.directory}"):
            if name in {file.name for file in order.files}:
                place.remove(f"{root}/{order.directory}/{name}")


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def _give_way() -> None:
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IOPRIO_BEST_EFFORT_LOWEST)  # 1 = this process; not worth failing for
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("dougong-writer")


if __name__ == "__main__":
    main()
