"""Durable checkpoints without torch: manifest, commit mark, verification, listing, retention.

```
checkpoints/step-000000100-g003/
    __0_0.distcp …          tensors, in the layout of torch.distributed.checkpoint (DCP)
    rank-0.state …          what belongs to one rank alone: RNG, data position, settings
    .metadata               DCP's own index over the tensors
    manifest.json           every file with its size and checksum
    COMMIT                  the checksum of manifest.json; a checkpoint without it does not exist
```

A directory is never reused: its name carries the generation that wrote it. So a half-written one is never in the way,
and nothing has to be renamed, which object stores cannot do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import msgspec
import xxhash

from dougong.errors import CheckpointDamaged, UserError

_CHUNK_BYTES = 8 * 2**20
_DIRECTORY = re.compile(r"step-([0-9]+)-g([0-9]+)")
FORMAT_VERSION = 1


class FileRecord(msgspec.Struct, frozen=True, array_like=True):
    """A file of a checkpoint: its size and the xxh3-128 of its bytes."""

    name: str
    num_bytes: int
    xxh3: str


class ItemRecord(msgspec.Struct, frozen=True, array_like=True):
    """Where a value lies in a checkpoint file. `dtype` "" = not a tensor. `key_path` as DCP flattens names.

    Of a tensor in parts, `shape` is this part's, which begins at `offsets` of a whole of `global_shape`, in elements.
    """

    fqn: str
    key_path: tuple[str | int, ...]
    file: str
    offset_bytes: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...] = ()
    global_shape: tuple[int, ...] | None = None
    """None = the part is the whole."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a durable checkpoint consists of."""

    format_version: int
    run_id: str
    step: int
    generation: int
    world_size: int
    time_ns: int
    files: tuple[FileRecord, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A directory that looks like a checkpoint."""

    directory: str
    step: int
    generation: int
    is_committed: bool
    is_rejected: bool = False
    """A byte of it was found wrong; it is kept for a look until retention takes it."""


class Place(Protocol):
    """The few things asked of a file system. `fsspec` file systems are adapted to it in `storage_at`."""

    def open_read(self, path: str) -> Any: ...
    def write(self, path: str, content: bytes) -> None: ...
    def names(self, path: str) -> tuple[str, ...]: ...
    def size_bytes(self, path: str) -> int: ...
    def remove_tree(self, path: str) -> None: ...
    def make_directory(self, path: str) -> None: ...


class LocalPlace:
    """A local or mounted file system, with fsync of file and directory."""

    def open_read(self, path: str) -> Any:
        return open(path, "rb")

    def write(self, path: str, content: bytes) -> None:
        from pathlib import Path

        from dougong.run.layout import write_atomically

        write_atomically(Path(path), content)

    def names(self, path: str) -> tuple[str, ...]:
        try:
            return tuple(sorted(os.listdir(path)))
        except FileNotFoundError:
            return ()

    def size_bytes(self, path: str) -> int:
        return os.stat(path).st_size

    def remove_tree(self, path: str) -> None:
        import shutil

        shutil.rmtree(path)

    def make_directory(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)


class FsspecPlace:
    """Any file system that `fsspec` reaches. An object store makes an object visible only when it is complete."""

    def __init__(self, filesystem: Any) -> None:
        self._fs = filesystem

    def open_read(self, path: str) -> Any:
        return self._fs.open(path, "rb")

    def write(self, path: str, content: bytes) -> None:
        with self._fs.open(path, "wb") as file:
            file.write(content)

    def names(self, path: str) -> tuple[str, ...]:
        # fsspec caches the listings of object stores, and other processes write here
        self._fs.invalidate_cache(path)
        try:
            listed = cast("list[str]", self._fs.ls(path, detail=False))
        except FileNotFoundError:
            return ()
        return tuple(sorted(name.rstrip("/").rsplit("/", 1)[-1] for name in listed))

    def size_bytes(self, path: str) -> int:
        return int(self._fs.size(path))

    def remove_tree(self, path: str) -> None:
        self._fs.rm(path, recursive=True)

    def make_directory(self, path: str) -> None:
        self._fs.makedirs(path, exist_ok=True)


def storage_at(url: str) -> tuple[Place, str]:
    """The file system of a path or URL, and the path within it. A plain path needs no extra package."""
    if "://" not in url:
        return LocalPlace(), url
    protocol = url.split("://", 1)[0]
    if protocol == "file":
        return LocalPlace(), url.split("://", 1)[1]
    try:
        import fsspec  # pyright: ignore[reportMissingImports,reportMissingTypeStubs,reportUnknownVariableType]
    except ImportError:
        from dougong.errors import MissingExtra

        raise MissingExtra("fsspec", extra="train", needed_for=f"checkpoints at {url}") from None
    try:
        filesystem, path = cast("tuple[Any, str]", cast("Any", fsspec.core).url_to_fs(url))
    except (ValueError, ImportError) as error:
        raise UserError(
            f"checkpoints cannot be kept at {url!r}: {error}",
            where="--checkpoint-dir",
            mend="give a directory, or a URL of a protocol that fsspec knows and whose package is installed",
        ) from error
    return FsspecPlace(filesystem), path


def directory_name(step: int, *, generation: int) -> str:
    return f"step-{step:09d}-g{generation:03d}"


def list_stored(url: str) -> tuple[Stored, ...]:
    """All checkpoint directories, newest first (by step, then by generation), committed or not."""
    place, root = storage_at(url)
    found = [stored for name in place.names(root) if (stored := _parse(place, root, name)) is not None]
    return tuple(sorted(found, key=lambda stored: (stored.step, stored.generation), reverse=True))


def commit(url: str, manifest: Manifest) -> None:
    """Make the checkpoint exist: manifest, then the mark. Everything named must be on disk and synced before."""
    place, root = storage_at(url)
    base = f"{root}/{directory_name(manifest.step, generation=manifest.generation)}"
    content = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    place.write(f"{base}/manifest.json", content)
    place.write(f"{base}/COMMIT", xxhash.xxh3_128_hexdigest(content).encode())


def read_manifest(url: str, directory: str) -> Manifest:
    """The manifest of a committed checkpoint. Raises CheckpointDamaged with the reason."""
    place, root = storage_at(url)
    path = f"{root}/{directory}"
    try:
        with place.open_read(f"{path}/COMMIT") as file:
            mark = file.read().decode("ascii", "replace").strip()
    except FileNotFoundError:
        raise CheckpointDamaged(path, reason="it was never committed (no COMMIT mark)") from None
    try:
        with place.open_read(f"{path}/manifest.json") as file:
            content = file.read()
    except FileNotFoundError:
        raise CheckpointDamaged(path, reason="manifest.json is missing") from None
    if xxhash.xxh3_128_hexdigest(content) != mark:
        raise CheckpointDamaged(path, reason="manifest.json is not the one that was committed")
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except msgspec.MsgspecError as error:
        raise CheckpointDamaged(path, reason=f"manifest.json cannot be read: {error}") from error
    if manifest.format_version != FORMAT_VERSION:
        raise CheckpointDamaged(
            path, reason=f"format version {manifest.format_version}, this program reads {FORMAT_VERSION}"
        )
    return manifest


def verify(url: str, directory: str, *, on_read: Callable[[int], None] = lambda _: None) -> Manifest:
    """Read every byte of a checkpoint and compare. Returns its manifest. Raises CheckpointDamaged.

    `on_read` is told the number of bytes of each chunk read.
    """
    manifest = read_manifest(url, directory)
    place, root = storage_at(url)
    for record in manifest.files:
        path = f"{root}/{directory}/{record.name}"
        if "/" in record.name or record.name in (".", ".."):
            raise CheckpointDamaged(path, reason="the manifest names a file outside the checkpoint")
        try:
            size_bytes = place.size_bytes(path)
        except FileNotFoundError:
            raise CheckpointDamaged(path, reason="the file is missing") from None
        if size_bytes != record.num_bytes:
            raise CheckpointDamaged(path, reason=f"{size_bytes} bytes, {record.num_bytes} were written")
        if _checksum(place, path, on_read=on_read) != record.xxh3:
            raise CheckpointDamaged(path, reason="checksum differs from what was written (xxh3-128)")
    return manifest


def beyond_retention(stored: tuple[Stored, ...], *, keep: int) -> tuple[Stored, ...]:
    """The committed checkpoints to delete so that the `keep` written last remain. Never the last good one.

    A later generation is newer also at a lower step: had the higher one been readable, it would have been restored.
    Uncommitted and rejected ones older than the newest good one go too.
    """
    assert keep >= 1
    good = [item for item in stored if item.is_committed and not item.is_rejected]
    if not good:
        return ()
    good.sort(key=_when_written, reverse=True)
    leftovers = [s for s in stored if s not in good and _when_written(s) < _when_written(good[0])]
    return (*good[keep:], *leftovers)


def reject(url: str, directory: str, *, reason: str) -> None:
    """Mark a checkpoint as damaged, so that retention does not count it among the good ones."""
    place, root = storage_at(url)
    place.write(f"{root}/{directory}/REJECTED", reason.encode())


def delete(url: str, directory: str) -> None:
    """Remove a checkpoint; its mark goes first, so that a crash in between leaves no false one."""
    place, root = storage_at(url)
    path = f"{root}/{directory}"
    if "COMMIT" in place.names(path):
        place.remove_tree(f"{path}/COMMIT") if not isinstance(place, LocalPlace) else os.unlink(f"{path}/COMMIT")
    place.remove_tree(path)


def checksum_chunks(chunks: Iterator[bytes]) -> str:
    digest = xxhash.xxh3_128()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _when_written(stored: Stored) -> tuple[int, int]:
    return stored.generation, stored.step


def _checksum(place: Place, path: str, *, on_read: Callable[[int], None]) -> str:
    with place.open_read(path) as file:
        return checksum_chunks(_told(iter(lambda: file.read(_CHUNK_BYTES), b""), on_read))


def _told(chunks: Iterator[bytes], on_read: Callable[[int], None]) -> Iterator[bytes]:
    for chunk in chunks:
        on_read(len(chunk))
        yield chunk


def _parse(place: Place, root: str, name: str) -> Stored | None:
    match = _DIRECTORY.fullmatch(name)
    if match is None:
        return None
    names = place.names(f"{root}/{name}")
    return Stored(
        directory=name,
        step=int(match[1]),
        generation=int(match[2]),
        is_committed="COMMIT" in names,
        is_rejected="REJECTED" in names,
    )
