"""Safetensors files: a header that says what lies where, then the bytes.

Source of the format: github.com/huggingface/safetensors, README, "Format"; the index of several files as
`huggingface_hub` writes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from dougong.errors import UserError
from dougong.run.layout import sync_directory, write_atomically

_ALIGN_BYTES = 8
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
"""The name of each torch dtype; those of packed or other kinds have none."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def header_bytes(entries: Sequence[TensorEntry], *, metadata: Mapping[str, str]) -> bytes:
    """The length and the header of a file with these tensors, in this order. Raises UserError for a dtype that the
    format does not have."""
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for entry in entries:
        if entry.dtype not in DTYPES:
            raise UserError(
                f"{entry.name} is {entry.dtype}, which safetensors does not have",
                where="--format safetensors",
                mend="export a part without it (--part), or read the checkpoint with torch.distributed.checkpoint",
            )
        table[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (at, at + entry.num_bytes),
        }
        at += entry.num_bytes
    text = msgspec.json.encode(table)
    text += b" " * (-len(text) % _ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def split(entries: Sequence[TensorEntry], *, max_file_bytes: int) -> tuple[tuple[TensorEntry, ...], ...]:
    """In which files the tensors stand: in order, as many in each as fit; a larger one has a file of its own."""
    files: list[list[TensorEntry]] = []
    room_bytes = 0
    for entry in entries:
        if not files or entry.num_bytes > room_bytes:
            files.append([])
            room_bytes = max_file_bytes
        files[-1].append(entry)
        room_bytes -= entry.num_bytes
    return tuple(tuple(file) for file in files)


def write_export(
    directory: Path,
    entries: Sequence[TensorEntry],
    *,
    content_of: Callable[[TensorEntry], memoryview],
    metadata: Mapping[str, str],
    max_file_bytes: int,
) -> tuple[Path, ...]:
    """Write the tensors, synced; more than one file gets an index. One tensor is held at a time. The files' paths."""
    files = split(entries, max_file_bytes=max_file_bytes)
    paths: list[Path] = []
    placed: dict[str, str] = {}
    for number, file in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write_file(directory / name, file, content_of=content_of, metadata=metadata)
        paths.append(directory / name)
        placed |= dict.fromkeys((entry.name for entry in file), name)
    if len(files) > 1:
        total_bytes = sum(entry.num_bytes for entry in entries)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": placed}
        paths.append(directory / "model.safetensors.index.json")
        write_atomically(paths[-1], msgspec.json.format(msgspec.json.encode(index), indent=2))
    return tuple(paths)


def _write_file(
    path: Path,
    entries: Sequence[TensorEntry],
    *,
    content_of: Callable[[TensorEntry], memoryview],
    metadata: Mapping[str, str],
) -> None:
    staging = path.with_name(f".{path.name}.tmp")
    try:
        with staging.open("wb") as file:
            file.write(header_bytes(entries, metadata=metadata))
            for entry in entries:
                content = content_of(entry)
                assert len(content) == entry.num_bytes
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        staging.rename(path)
        sync_directory(path.parent)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise
