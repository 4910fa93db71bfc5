"""Small durable checkpoints without torch, for the tests of what is done with them."""

from __future__ import annotations

from pathlib import Path

import xxhash

from dougong.run import manifest
from dougong.run.manifest import FileRecord, Manifest

CONTENTS = {"__0_0.distcp": b"tensors " * 40, "rank-0.state": b"state of rank 0", ".metadata": b"index"}


def write_files(root: Path, *, step: int, generation: int = 1) -> Manifest:
    """The files of a checkpoint that is not committed yet, and the manifest it would be committed with."""
    directory = root / manifest.directory_name(step, generation=generation)
    directory.mkdir(parents=True)
    for name, content in CONTENTS.items():
        (directory / name).write_bytes(content)
    return Manifest(
        format_version=manifest.FORMAT_VERSION,
        run_id="r",
        step=step,
        generation=generation,
        world_size=1,
        time_ns=10**18,
        files=tuple(
            FileRecord(name, len(content), xxhash.xxh3_128_hexdigest(content)) for name, content in CONTENTS.items()
        ),
    )


def make(root: Path, *, step: int, generation: int = 1, is_committed: bool = True) -> Path:
    """A whole checkpoint; its directory."""
    record = write_files(root, step=step, generation=generation)
    if is_committed:
        manifest.commit(str(root), record)
    return root / manifest.directory_name(step, generation=generation)


def flip(path: Path, *, offset_bytes: int, bit: int = 4) -> None:
    """Change one bit of a file, as a bad disk would."""
    content = bytearray(path.read_bytes())
    content[offset_bytes] ^= 1 << bit
    path.write_bytes(content)
