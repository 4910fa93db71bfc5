"""Durable checkpoints without torch: manifest, commit mark, verification, listing, retention.

```
checkpoints/step-000000100-g003/
    __0_0.distcp …          tensors, in the layout of torch.distributed.checkpoint (DCP)
    rank-0.state …          what belongs to one rank alone: RNG, data position, settings
    .metadata               DCP's own index over the tensors
    manifest.json           every file with its size and checksum
    COMMIT                  the checksum of manifest.json; a checkpoint without it does not exist
    REJECTED                a byte was once found wrong
    UNLOCKED                the word by which the owner opened the retention lock
```

A directory is never reused: its name carries the generation that wrote it. So a half-written one is never in the way,
and nothing has to be renamed, which object stores cannot do.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec
import xxhash

from dougong.errors import CheckpointDamaged, CheckpointLocked, UserError
from dougong.run import retention_lock
from dougong.run.retention_lock import Evidence, Moment, RetentionLock

if TYPE_CHECKING:
    from dougong.run.sealed import Sealer

_CHUNK_BYTES = 8 * 2**20
_NUM_READERS = 4
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
    global_shape: tuple[int, ...] | None = None
    """None = the part is the whole."""
    offsets: tuple[int, ...] = ()


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a durable checkpoint consists of."""

    format_version: int
    run_id: str
    step: int
    generation: int
    world_size: int
    time_ns: int
    files: tuple[FileRecord, ...]
    sealed_by: str = ""
    """Fingerprint of the key that encrypted the files; "" = they are plain."""
    lock: RetentionLock | None = None

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
    def open_write(self, path: str) -> Any: ...
    def write(self, path: str, content: bytes) -> None: ...
    def names(self, path: str) -> tuple[str, ...]: ...
    def size_bytes(self, path: str) -> int: ...
    def remove(self, path: str) -> None: ...
    def remove_tree(self, path: str) -> None: ...
    def make_directory(self, path: str) -> None: ...


class LocalPlace:
    """A local or mounted file system, with fsync of file and directory."""

    def open_read(self, path: str) -> Any:
        return open(path, "rb")

    def open_write(self, path: str) -> Any:
        return open(path, "xb")

    def write(self, path: str, content: bytes) -> None:
        from dougong.run.layout import write_atomically

        write_atomically(Path(path), content)

    def names(self, path: str) -> tuple[str, ...]:
        try:
            return tuple(sorted(os.listdir(path)))
        except FileNotFoundError:
            return ()

    def size_bytes(self, path: str) -> int:
        return os.stat(path).st_size

    def remove(self, path: str) -> None:
        os.unlink(path)

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

    def open_write(self, path: str) -> Any:
        return self._fs.open(path, "wb")

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

    def remove(self, path: str) -> None:
        self._fs.rm_file(path)

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


def is_directory_name(name: str) -> bool:
    return _DIRECTORY.fullmatch(name) is not None


def list_stored(url: str) -> tuple[Stored, ...]:
    """All checkpoint directories, newest first (by step, then by generation), committed or not."""
    place, root = storage_at(url)
    found = [stored for name in place.names(root) if (stored := _parse(place, root, name)) is not None]
    return tuple(sorted(found, key=lambda stored: (stored.step, stored.generation), reverse=True))


def commit(
    url: str, manifest: Manifest, *, lock_s: float = 0.0, lock_key: bytes | None = None, since: Moment | None = None
) -> None:
    """Make the checkpoint exist: manifest, then the mark. Everything named must be on disk and synced before.

    With `lock_s` it is locked from moment `since` on. Twice does no harm. Raises CheckpointDamaged if a file is not
    there or has another size, and OSError; then there is no mark.
    """
    place, root = storage_at(url)
    name = directory_name(manifest.step, generation=manifest.generation)
    base = f"{root}/{name}"
    if "COMMIT" in place.names(base):
        return
    for record in manifest.files:
        _check_size(place, base, record)
    if lock_s > 0:
        assert since is not None
        lock = retention_lock.make_lock(lock_s, name=name, content=_unlocked(manifest), key=lock_key, since=since)
        manifest = msgspec.structs.replace(manifest, lock=lock)
    content = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    place.write(f"{base}/manifest.json", content)
    place.write(f"{base}/COMMIT", xxhash.xxh3_128_hexdigest(content).encode())
    if lock_s > 0 and isinstance(place, LocalPlace):
        retention_lock.protect(Path(base))


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


def verify(
    url: str, directory: str, *, on_read: Callable[[int], None] = lambda _: None, sealer: Sealer | None = None
) -> Manifest:
    """Read every byte of a checkpoint and compare, several files at once. Returns its manifest. Raises
    CheckpointDamaged.

    `on_read` is told the number of bytes of each chunk read, in any thread. With the key of an encrypted checkpoint it
    is also known that nobody without that key wrote it; a wrong key raises UserError.
    """
    manifest = read_manifest(url, directory)
    place, root = storage_at(url)
    base = f"{root}/{directory}"
    for record in manifest.files:
        _check_size(place, base, record)
    # waiting for the disk goes on in parallel; hashing itself is faster than any disk
    _each_in_threads(manifest.files, lambda record: _compare(place, base, record, on_read=on_read))
    if sealer is not None and manifest.sealed_by:
        _each_in_threads(manifest.files, lambda record: _check_seal(place, f"{base}/{record.name}", sealer))
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
    _write_mark(place, f"{root}/{directory}", "REJECTED", reason.encode())


def why_locked(url: str, directory: str, *, moment: Moment, key: bytes | None = None) -> str:
    """Why a checkpoint must not be deleted now; "" = it may be. With the owner's `key` its record is checked too."""
    place, root = storage_at(url)
    base = f"{root}/{directory}"
    content = _read_or_nothing(place, f"{base}/manifest.json")
    manifest = _decoded(content)
    if manifest is None:
        is_protected = isinstance(place, LocalPlace) and content != b"" and not os.stat(base).st_mode & 0o222
        return "its manifest cannot be read, and its directory is read-only as a locked one's" if is_protected else ""
    if manifest.lock is None:
        return ""
    mark = _read_or_nothing(place, f"{base}/COMMIT").decode("ascii", "replace").strip()
    evidence = Evidence(
        is_as_committed=mark == xxhash.xxh3_128_hexdigest(content),
        changed_ns=os.stat(f"{base}/manifest.json").st_ctime_ns if isinstance(place, LocalPlace) else None,
        opened_by=_read_or_nothing(place, f"{base}/UNLOCKED").decode("ascii", "replace").strip(),
        is_seal_right=None if key is None or not manifest.lock.seal else _is_seal_right(manifest, directory, key),
    )
    return retention_lock.why_locked(manifest.lock, evidence, moment)


def unlock(url: str, directory: str, *, key: bytes) -> None:
    """Open the retention lock with the owner's key. Raises UserError if there is none, or if the key is another."""
    place, root = storage_at(url)
    base = f"{root}/{directory}"
    manifest = _decoded(_read_or_nothing(place, f"{base}/manifest.json"))
    lock = None if manifest is None else manifest.lock
    if lock is None:
        raise UserError(f"{directory} is not locked", where=url, mend="nothing is to be done")
    word = retention_lock.opening_word(directory, key).hex()
    if not retention_lock.is_opening_word(lock, word):
        what = (
            "was locked without an owner's key: only time opens it" if not lock.opening else "has another owner's key"
        )
        raise UserError(f"{directory} {what}", where="--key", mend="give the file that --lock-key named in the run")
    _write_mark(place, base, "UNLOCKED", word.encode())


def delete(url: str, directory: str, *, moment: Moment, key: bytes | None = None) -> None:
    """Remove a checkpoint; its mark goes first, so that a crash in between leaves no false one.

    Raises CheckpointLocked if its retention lock still holds.
    """
    place, root = storage_at(url)
    path = f"{root}/{directory}"
    if reason := why_locked(url, directory, moment=moment, key=key):
        raise CheckpointLocked(path, reason=reason)
    names = place.names(path)
    if isinstance(place, LocalPlace) and names:
        retention_lock.unprotect(Path(path))
    if "COMMIT" in names:
        place.remove(f"{path}/COMMIT")
    place.remove_tree(path)


def _when_written(stored: Stored) -> tuple[int, int]:
    return stored.generation, stored.step


def _check_size(place: Place, base: str, record: FileRecord) -> None:
    path = f"{base}/{record.name}"
    if "/" in record.name or record.name in (".", ".."):
        raise CheckpointDamaged(path, reason="the manifest names a file outside the checkpoint")
    try:
        size_bytes = place.size_bytes(path)
    except FileNotFoundError:
        raise CheckpointDamaged(path, reason="the file is missing") from None
    if size_bytes != record.num_bytes:
        raise CheckpointDamaged(path, reason=f"{size_bytes} bytes, {record.num_bytes} were written")


def _compare(place: Place, base: str, record: FileRecord, *, on_read: Callable[[int], None]) -> None:
    path = f"{base}/{record.name}"
    digest = xxhash.xxh3_128()
    with place.open_read(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            on_read(len(chunk))
            digest.update(chunk)
    if digest.hexdigest() != record.xxh3:
        raise CheckpointDamaged(path, reason="checksum differs from what was written (xxh3-128)")


def _each_in_threads(records: tuple[FileRecord, ...], work: Callable[[FileRecord], None]) -> None:
    """Largest first over a few threads. The first error of the first file that has one is raised; no new file is begun
    after an error."""
    waiting = sorted(records, key=lambda record: record.num_bytes)
    errors: dict[str, BaseException] = {}

    def run() -> None:
        while not errors:
            try:
                record = waiting.pop()
            except IndexError:
                return
            try:
                work(record)
            except BaseException as error:
                errors[record.name] = error

    threads = [threading.Thread(target=run) for _ in range(min(_NUM_READERS, len(records)) - 1)]
    for thread in threads:
        thread.start()
    run()
    for thread in threads:
        thread.join()
    for record in records:
        if record.name in errors:
            raise errors[record.name]


def _check_seal(place: Place, path: str, sealer: Sealer) -> None:
    from dougong.run.sealed import UnsealedPlace

    with UnsealedPlace(place, sealer, must_be_sealed=True).open_read(path) as file:
        while file.read(_CHUNK_BYTES):
            pass


def _read_or_nothing(place: Place, path: str) -> bytes:
    try:
        with place.open_read(path) as file:
            return file.read()
    except FileNotFoundError:
        return b""


def _decoded(content: bytes) -> Manifest | None:
    try:
        return msgspec.json.decode(content, type=Manifest)
    except msgspec.MsgspecError:
        return None


def _unlocked(manifest: Manifest) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(manifest, lock=None))


def _is_seal_right(manifest: Manifest, directory: str, key: bytes) -> bool:
    assert manifest.lock is not None
    return retention_lock.is_seal_right(manifest.lock, name=directory, content=_unlocked(manifest), key=key)


def _write_mark(place: Place, base: str, name: str, content: bytes) -> None:
    """A locked checkpoint's directory is opened for as long as it takes."""
    is_closed = isinstance(place, LocalPlace) and not os.stat(base).st_mode & 0o222
    if is_closed:
        retention_lock.set_open(Path(base), is_open=True)
    try:
        place.write(f"{base}/{name}", content)
    finally:
        if is_closed:
            with contextlib.suppress(OSError):
                retention_lock.set_open(Path(base), is_open=False)


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
