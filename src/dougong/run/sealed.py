"""Encrypted checkpoint files: AES-256-GCM in chunks, so that any part can be read and nothing can be changed unseen.

```
header   magic 8 · fingerprint of the key 8 · salt 32 · bytes per chunk 4 · zeros 12
chunk i  ciphertext · tag 16          nonce = i; authenticated with it: header, name of the file, i, is it the last
```

Each file has a key of its own, made of the owner's key and the file's random salt (HKDF-SHA256), so a nonce never comes
twice under one key. The name (directory and file) keeps files from being exchanged, the mark of the last chunk keeps
them from being cut. Source: NIST SP 800-38D (GCM); RFC 5869 (HKDF); the chunks follow the STREAM construction of Hoang,
Reyhanitabar, Rogaway and Vizár, "Online Authenticated-Encryption and its Nonce-Reuse Misuse-Resistance".
"""

from __future__ import annotations

import hmac
import io
import os
import struct
from pathlib import Path
from typing import Any, cast

import msgspec

from dougong.errors import CheckpointDamaged, MissingExtra, UserError
from dougong.run.manifest import FileRecord, Place
from dougong.run.new_file import NewFile

KEY_BYTES = 32
_HEADER = struct.Struct("<8s8s32sI12x")
_MAGIC = b"DGSEAL01"
_CHUNK_BYTES = 2**20
_TAG_BYTES = 16
_MEND = "give the file of the key that it was written with (--checkpoint-key FILE)"


class Sealer(msgspec.Struct, frozen=True):
    """The owner's key. Never printed, logged or stored."""

    key: bytes

    @property
    def fingerprint(self) -> str:
        """Names the key without telling it."""
        return hmac.digest(self.key, b"dougong key fingerprint", "sha256")[:8].hex()

    def __repr__(self) -> str:
        return f"Sealer({self.fingerprint})"


def load_sealer(path: str | Path, *, option: str = "--checkpoint-key") -> Sealer:
    """The key in a file: 32 bytes, or 64 hexadecimal digits. Raises UserError, and MissingExtra."""
    _cipher(bytes(KEY_BYTES))
    return Sealer(load_key(path, option=option))


def load_key(path: str | Path, *, option: str) -> bytes:
    """As `load_sealer`, for a key that encrypts nothing."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(
            f"the key file {str(path)!r} cannot be read: {error.strerror}",
            where=option,
            mend="give a readable file; `openssl rand -hex 32 > FILE` makes one",
        ) from error
    if len(content) == KEY_BYTES:
        return content
    try:
        key = bytes.fromhex(content.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UserError(
            f"the key file {str(path)!r} holds no key of {KEY_BYTES} bytes",
            where=option,
            mend=f"{KEY_BYTES} bytes, or {2 * KEY_BYTES} hexadecimal digits; `openssl rand -hex 32 > FILE` makes one",
        )
    return key


def sealed_bytes(num_bytes: int) -> int:
    """The size of a file of `num_bytes` once it is sealed."""
    return _HEADER.size + num_bytes + _TAG_BYTES * _num_chunks(num_bytes)


class SealedFile:
    """Encrypts what it is given on the way into another new file."""

    def __init__(self, inner: NewFile, sealer: Sealer, *, name: str) -> None:
        self._inner = inner
        self._name = name
        salt = os.urandom(32)
        self._header = _HEADER.pack(_MAGIC, bytes.fromhex(sealer.fingerprint), salt, _CHUNK_BYTES)
        self._cipher = _cipher(_file_key(sealer.key, salt))
        self._index = 0
        self._held = bytearray()
        inner.write(memoryview(self._header))

    def write(self, content: memoryview, *, is_on_page: bool = False) -> None:
        while content:
            if len(self._held) == _CHUNK_BYTES:  # more comes, so it is not the last
                self._seal(bytes(self._held), is_last=False)
                self._held.clear()
            if not self._held and len(content) > _CHUNK_BYTES:
                self._seal(content[:_CHUNK_BYTES], is_last=False)
                content = content[_CHUNK_BYTES:]
                continue
            part = content[: _CHUNK_BYTES - len(self._held)]
            self._held += part
            content = content[len(part) :]

    def finish(self) -> FileRecord:
        self._seal(bytes(self._held), is_last=True)
        return self._inner.finish()

    def discard(self) -> None:
        self._inner.discard()

    def _seal(self, chunk: bytes | memoryview, *, is_last: bool) -> None:
        bound = _bound(self._header, self._name, self._index, is_last=is_last)
        self._inner.write(memoryview(self._cipher.encrypt(_nonce(self._index), chunk, bound)))
        self._index += 1


class UnsealedPlace:
    """A storage whose sealed files read as what was put into them; all others as they are, if there may be such.

    Without the key, opening a sealed file raises UserError; one that was changed raises CheckpointDamaged, and so
    does a plain one where every file must be sealed.
    """

    def __init__(self, inner: Place, sealer: Sealer | None, *, must_be_sealed: bool = False) -> None:
        self._inner = inner
        self._sealer = sealer
        self._must_be_sealed = must_be_sealed

    def open_read(self, path: str) -> Any:
        file = self._inner.open_read(path)
        header = file.read(_HEADER.size)
        file.seek(0)
        if header[: len(_MAGIC)] != _MAGIC:
            if self._must_be_sealed:
                file.close()
                raise CheckpointDamaged(path, reason="it is not encrypted, though the others of its checkpoint are")
            return file
        if self._sealer is None:
            file.close()
            raise UserError(f"the checkpoint is encrypted, with key {header[8:16].hex()}", where=path, mend=_MEND)
        if header[8:16].hex() != self._sealer.fingerprint:
            file.close()
            raise UserError(
                f"the checkpoint is encrypted with key {header[8:16].hex()}; the one given is"
                f" {self._sealer.fingerprint}",
                where=path,
                mend=_MEND,
            )
        return io.BufferedReader(_SealedReader(file, self._sealer, path=path), buffer_size=_CHUNK_BYTES)

    def open_write(self, path: str) -> Any:
        return self._inner.open_write(path)

    def write(self, path: str, content: bytes) -> None:
        self._inner.write(path, content)

    def names(self, path: str) -> tuple[str, ...]:
        return self._inner.names(path)

    def size_bytes(self, path: str) -> int:
        return self._inner.size_bytes(path)

    def remove(self, path: str) -> None:
        self._inner.remove(path)

    def remove_tree(self, path: str) -> None:
        self._inner.remove_tree(path)

    def make_directory(self, path: str) -> None:
        self._inner.make_directory(path)


class _SealedReader(io.RawIOBase):
    """Decrypts one chunk at a time."""

    def __init__(self, file: Any, sealer: Sealer, *, path: str) -> None:
        super().__init__()
        self._file = file
        self._path = path
        self._name = "/".join(path.rsplit("/", 2)[-2:])
        self._header = file.read(_HEADER.size)
        if len(self._header) < _HEADER.size:
            raise CheckpointDamaged(path, reason="the file is cut off")
        _, _, salt, self._chunk_bytes = _HEADER.unpack(self._header)
        payload_bytes = file.seek(0, os.SEEK_END) - _HEADER.size
        framed_bytes = self._chunk_bytes + _TAG_BYTES
        self._num_chunks = -(-payload_bytes // framed_bytes)
        self._num_bytes = payload_bytes - _TAG_BYTES * self._num_chunks
        if self._chunk_bytes != _CHUNK_BYTES or self._num_chunks == 0 or self._num_bytes < 0:
            raise CheckpointDamaged(path, reason="the file is cut off or changed")
        self._cipher = _cipher(_file_key(sealer.key, salt))
        self._at = 0
        self._index = -1
        self._chunk = b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._num_bytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        index, start = divmod(self._at, self._chunk_bytes)
        if self._at >= self._num_bytes and not (self._num_bytes == 0 and self._index < 0):
            return 0
        if index != self._index:
            self._open(index)
        part = self._chunk[start : start + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _open(self, index: int) -> None:
        from cryptography.exceptions import (  # pyright: ignore[reportMissingImports]
            InvalidTag,  # pyright: ignore[reportUnknownVariableType]
        )

        self._file.seek(_HEADER.size + index * (self._chunk_bytes + _TAG_BYTES))
        framed = self._file.read(self._chunk_bytes + _TAG_BYTES)
        bound = _bound(self._header, self._name, index, is_last=index == self._num_chunks - 1)
        try:
            self._chunk = self._cipher.decrypt(_nonce(index), framed, bound)
        except (InvalidTag, ValueError):
            reason = f"chunk {index} is not what was encrypted under this name (AES-GCM)"
            raise CheckpointDamaged(self._path, reason=reason) from None
        self._index = index


def _num_chunks(num_bytes: int) -> int:
    return max(1, -(-num_bytes // _CHUNK_BYTES))


def _nonce(index: int) -> bytes:
    return index.to_bytes(12, "big")


def _bound(header: bytes, name: str, index: int, *, is_last: bool) -> bytes:
    """What a chunk is authenticated with besides its own bytes. The length keeps the name apart from the rest."""
    text = name.encode()
    return header + struct.pack("<IQB", len(text), index, is_last) + text


def _file_key(key: bytes, salt: bytes) -> bytes:
    """HKDF-SHA256 for one block (RFC 5869, sections 2.2 and 2.3)."""
    extracted = hmac.digest(salt, key, "sha256")
    return hmac.digest(extracted, b"dougong checkpoint file\x01", "sha256")


def _cipher(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import (  # pyright: ignore[reportMissingImports]
            AESGCM,  # pyright: ignore[reportUnknownVariableType]
        )
    except ImportError:
        raise MissingExtra("cryptography", extra="crypto", needed_for="encrypted checkpoints") from None
    return cast("Any", AESGCM)(key)
