"""Executes a write order: makes the files of one rank's part of a checkpoint, all or none of them."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Generator, Sequence
from pathlib import Path

from dougong.run.layout import sync_directory
from dougong.run.manifest import FileRecord, LocalPlace, Place
from dougong.run.new_file import BLOCK_BYTES, NewFile, OnChunk, new_file
from dougong.run.sealed import SealedFile, Sealer, sealed_bytes
from dougong.run.write_order import FileOrder, Given


def write_files(
    files: Sequence[FileOrder],
    buffer: memoryview,
    *,
    place: Place,
    directory: str,
    on_chunk: OnChunk = lambda _: None,
    sealer: Sealer | None = None,
) -> tuple[FileRecord, ...]:
    """Write the files into `directory`, synced, from a snapshot buffer that begins on a page of memory.

    Raises OSError (or what `on_chunk` raises); then none of the files is left. `FileExistsError` leaves what was there.
    """
    records: list[FileRecord] = []
    try:
        place.make_directory(directory)
        for file in files:
            records.append(_write(file, buffer, place=place, directory=directory, on_chunk=on_chunk, sealer=sealer))
        if isinstance(place, LocalPlace):
            sync_directory(Path(directory))
            sync_directory(Path(directory).parent)
    except BaseException:
        for record in records:
            with contextlib.suppress(OSError):
                place.remove(f"{directory}/{record.name}")
        raise
    return tuple(records)


@contextlib.contextmanager
def mapped(path: str) -> Generator[memoryview]:
    """A snapshot buffer for reading; "" = none. Raises OSError, ValueError."""
    if not path:
        yield memoryview(b"")
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        mapping = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    # not closed by hand: an error on its way up may still refer to a part of it
    yield memoryview(mapping)


def _write(
    file: FileOrder, buffer: memoryview, *, place: Place, directory: str, on_chunk: OnChunk, sealer: Sealer | None
) -> FileRecord:
    path = f"{directory}/{file.name}"
    num_bytes = file.num_bytes if sealer is None else sealed_bytes(file.num_bytes)
    target: NewFile = new_file(place, path, num_bytes=num_bytes, on_chunk=on_chunk)
    try:
        if sealer is not None:
            target = SealedFile(target, sealer, name=f"{directory.rsplit('/', 1)[-1]}/{file.name}")
        for segment in file.segments:
            if isinstance(segment, Given):
                target.write(memoryview(segment.content))
            else:
                end = segment.offset_bytes + segment.num_bytes
                if end > len(buffer):
                    raise ValueError(f"the order reaches to byte {end} of a buffer of {len(buffer)}")
                with buffer[segment.offset_bytes : end] as stretch:
                    target.write(stretch, is_on_page=segment.offset_bytes % BLOCK_BYTES == 0)
        return target.finish()
    except BaseException:
        target.discard()
        raise
