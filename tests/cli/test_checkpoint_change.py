from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dougong.cli.checkpoint import checkpoint
from dougong.clock import SystemClock
from dougong.errors import CheckpointDamaged, MissingExtra, UserError
from dougong.run import manifest, retention_lock
from dougong.run.manifest import FileRecord, LocalPlace, Manifest
from tests.run.made_checkpoint import flip, make, write_files

ALONE = "ignore:torch.distributed is disabled:UserWarning"
KEY = b"k" * 32


def call(*arguments: str | Path) -> Result:
    runner = CliRunner()
    return runner.invoke(checkpoint, [str(item) for item in arguments], standalone_mode=False, catch_exceptions=False)


# --- export ---


def torch_checkpoint(root: Path, *, sealer: Any = None) -> dict[str, Any]:
    """A committed checkpoint of step 7 that two ranks wrote half and half; the whole tensors by name."""
    import msgspec
    import torch

    from dougong.run.capture import write_snapshot
    from dougong.run.dcp_shard import METADATA_NAME, metadata_bytes
    from dougong.run.extent import Extent
    from dougong.run.shard_plan import ShardPlanner
    from dougong.run.snapshot import SnapshotFiles
    from dougong.run.state import read_table
    from dougong.run.write_files import write_files as write_orders
    from dougong.run.write_order import FileOrder, Given

    torch.manual_seed(1)
    whole = {
        "model.w": torch.randn(64, 300),
        "model.bias": torch.randn(6).to(torch.bfloat16),
        "optimizer.state.w.step": torch.tensor(7.0),
        "ema.half": torch.randn(2, 3).half(),
        "ema.flags": torch.tensor([True, False]),
        "ema.none": torch.empty(0, 4),
    }
    directory = f"{root}/{manifest.directory_name(7, generation=1)}"
    files: list[FileRecord] = []
    items: list[Any] = []
    for rank in range(2):
        tree = {name: value.chunk(2)[rank].clone() if name == "model.w" else value for name, value in whole.items()}
        snapshot = SnapshotFiles(root.parent / f"r{rank}")
        index, num_bytes = write_snapshot(snapshot, tree, step=7, generation=1, world_size=2)
        table, start = read_table(snapshot.buffer(index)[:num_bytes])
        records = tuple(
            msgspec.structs.replace(
                record,
                extent=Extent(
                    str(record.path[0]),
                    tuple(str(record.path[0]).split(".")),
                    tuple(whole[str(record.path[0])].shape),
                    (32 * rank, 0) if record.path[0] == "model.w" else (0,) * len(record.shape),
                    (rank,) if record.path[0] == "model.w" else (0, 1),
                ),
            )
            for record in table.records
        )
        head = msgspec.msgpack.encode(msgspec.structs.replace(table, records=records))
        buffer = bytearray(len(head).to_bytes(8, "little") + head)
        buffer += bytes(-len(buffer) % 4096) + snapshot.buffer(index)[start:num_bytes]
        plan = ShardPlanner(rank=rank).plan(memoryview(buffer))
        files += write_orders(plan.files, memoryview(buffer), place=LocalPlace(), directory=directory, sealer=sealer)
        items += plan.items
    index_file = FileOrder(METADATA_NAME, (Given(metadata_bytes(items)),))
    files += write_orders((index_file,), memoryview(b""), place=LocalPlace(), directory=directory, sealer=sealer)
    record = Manifest(
        format_version=1,
        run_id="r",
        step=7,
        generation=1,
        world_size=2,
        time_ns=0,
        files=tuple(files),
        sealed_by="" if sealer is None else sealer.fingerprint,
    )
    manifest.commit(str(root), record)
    return whole


def read_safetensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """By the letter of the format."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt", "run_id": "r", "step": "7"}
    data = content[8 + length :]
    ends = sorted(entry["data_offsets"] for entry in header.values())
    assert ends[0][0] == 0 and ends[-1][1] == len(data)
    return {
        name: (entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def raw(tensor: Any) -> bytes:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_an_export_is_bitwise_what_plain_dcp_loads(tmp_path: Path) -> None:
    import warnings

    import torch
    from torch.distributed.checkpoint.state_dict_loader import load

    whole = torch_checkpoint(tmp_path / "checkpoints")
    got = {name: torch.zeros_like(value) for name, value in whole.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(got, checkpoint_id=str(tmp_path / "checkpoints" / "step-000000007-g001"), no_dist=True)
    call("export", tmp_path / "checkpoints", tmp_path / "out")
    written = read_safetensors(tmp_path / "out" / "model.safetensors")
    assert set(written) == set(whole)
    for name, (_, shape, content) in written.items():
        assert shape == tuple(whole[name].shape)
        assert content == raw(got[name]) == raw(whole[name]), name
    assert written["model.bias"][0] == "BF16" and written["ema.flags"][0] == "BOOL"


def test_the_official_reader_agrees(tmp_path: Path) -> None:
    official = pytest.importorskip("safetensors.torch")
    whole = torch_checkpoint(tmp_path / "checkpoints")
    call("export", tmp_path / "checkpoints" / "step-000000007-g001", tmp_path / "out")
    got = official.load_file(tmp_path / "out" / "model.safetensors")
    assert {name: raw(value) for name, value in got.items()} == {name: raw(value) for name, value in whole.items()}


def test_one_part_is_exported_without_its_name(tmp_path: Path) -> None:
    torch_checkpoint(tmp_path / "checkpoints")
    call("export", tmp_path / "checkpoints", tmp_path / "out", "--part", "model")
    assert set(read_safetensors(tmp_path / "out" / "model.safetensors")) == {"w", "bias"}
    with pytest.raises(UserError, match="no tensor of 'nosuch'") as caught:
        call("export", tmp_path / "checkpoints", tmp_path / "again", "--part", "nosuch")
    assert "ema, model, optimizer" in caught.value.mend


def test_large_exports_are_several_files_with_an_index(tmp_path: Path) -> None:
    whole = torch_checkpoint(tmp_path / "checkpoints")
    call("export", tmp_path / "checkpoints", tmp_path / "out", "--max-file-size", "20B")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(math.prod(v.shape) * v.element_size() for v in whole.values())
    assert len(set(index["weight_map"].values())) >= 3
    for name, file in index["weight_map"].items():
        assert read_safetensors(tmp_path / "out" / file)[name][2] == raw(whole[name])


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    torch_checkpoint(tmp_path / "checkpoints")
    flip(tmp_path / "checkpoints" / "step-000000007-g001" / "__1_0.distcp", offset_bytes=5000)
    with pytest.raises(CheckpointDamaged):
        call("export", tmp_path / "checkpoints", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_never_writes_over_what_is_there(tmp_path: Path) -> None:
    torch_checkpoint(tmp_path / "checkpoints")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_text("mine")
    with pytest.raises(UserError, match="not an empty directory"):
        call("export", tmp_path / "checkpoints", tmp_path / "out")


def test_an_encrypted_checkpoint_is_exported_with_its_key_only(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from dougong.run.sealed import Sealer

    whole = torch_checkpoint(tmp_path / "checkpoints", sealer=Sealer(KEY))
    (tmp_path / "key").write_bytes(KEY)
    (tmp_path / "other").write_bytes(b"o" * 32)
    with pytest.raises(UserError, match="encrypted"):
        call("export", tmp_path / "checkpoints", tmp_path / "out")
    with pytest.raises(UserError, match="the one given is"):
        call("export", tmp_path / "checkpoints", tmp_path / "out", "--checkpoint-key", tmp_path / "other")
    call("export", tmp_path / "checkpoints", tmp_path / "out", "--checkpoint-key", tmp_path / "key")
    written = read_safetensors(tmp_path / "out" / "model.safetensors")
    assert {name: content for name, (_, _, content) in written.items()} == {n: raw(v) for n, v in whole.items()}


def test_a_stranger_who_mends_the_checksums_is_found_with_the_key(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from dougong.run.sealed import Sealer

    torch_checkpoint(tmp_path / "checkpoints", sealer=Sealer(KEY))
    (tmp_path / "key").write_bytes(KEY)
    directory = tmp_path / "checkpoints" / "step-000000007-g001"
    flip(directory / "rank-0.state", offset_bytes=80)
    mend_checksums(directory)
    assert "good" in call("verify", tmp_path / "checkpoints").stdout
    result = call("verify", tmp_path / "checkpoints", "--checkpoint-key", tmp_path / "key")
    assert result.return_value == 1 and "AES-GCM" in result.stdout


def test_a_plain_file_put_in_the_place_of_an_encrypted_one_is_found_with_the_key(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from dougong.run.sealed import Sealer

    torch_checkpoint(tmp_path / "checkpoints", sealer=Sealer(KEY))
    (tmp_path / "key").write_bytes(KEY)
    directory = tmp_path / "checkpoints" / "step-000000007-g001"
    sealed = directory / "rank-0.state"
    sealed.write_bytes(bytes(sealed.stat().st_size))
    mend_checksums(directory)
    result = call("verify", tmp_path / "checkpoints", "--checkpoint-key", tmp_path / "key")
    assert result.return_value == 1 and "not encrypted" in result.stdout


def mend_checksums(directory: Path) -> None:
    """Of manifest and COMMIT, as one can who knows the format but not the key."""
    import msgspec
    import xxhash

    found = manifest.read_manifest(str(directory.parent), directory.name)
    files = tuple(
        msgspec.structs.replace(file, xxh3=xxhash.xxh3_128_hexdigest((directory / file.name).read_bytes()))
        for file in found.files
    )
    content = msgspec.json.encode(msgspec.structs.replace(found, files=files))
    (directory / "manifest.json").write_bytes(content)
    (directory / "COMMIT").write_text(xxhash.xxh3_128_hexdigest(content))


def test_without_torch_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, step=1)
    monkeypatch.setitem(sys.modules, "dougong.run.dcp_export", None)
    with pytest.raises(MissingExtra, match="torch"):
        call("export", tmp_path, tmp_path / "out")


# --- rm and unlock ---


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """Two checkpoints: that of step 10 is locked by an owner, that of step 20 is not."""
    root = tmp_path / "checkpoints"
    record = write_files(root, step=10)
    manifest.commit(str(root), record, lock_s=3600.0, lock_key=KEY, since=retention_lock.now(SystemClock()))
    make(root, step=20)
    (tmp_path / "key").write_bytes(KEY)
    yield root
    if (root / "step-000000010-g001").exists():
        retention_lock.unprotect(root / "step-000000010-g001")


def test_rm_deletes_what_is_not_locked(locked: Path) -> None:
    assert call("rm", locked, "--step", "20").stdout == "step-000000020-g001\n"
    assert not (locked / "step-000000020-g001").exists()


def test_rm_respects_a_lock_until_its_owner_opens_it(locked: Path) -> None:
    with pytest.raises(UserError, match="locked for another") as caught:
        call("rm", locked, "--step", "10")
    assert "unlock" in caught.value.mend
    (locked.parent / "other").write_bytes(b"x" * 32)
    with pytest.raises(UserError, match="another owner's key"):
        call("unlock", locked, "--step", "10", "--key", locked.parent / "other")
    call("unlock", locked, "--step", "10", "--key", locked.parent / "key")
    call("rm", locked, "--step", "10")
    assert not (locked / "step-000000010-g001").exists()


def test_a_step_that_is_not_there_is_told_with_those_that_are(locked: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint of step 30") as caught:
        call("rm", locked, "--step", "30")
    assert "10, 20" in caught.value.mend


def test_a_locked_one_can_not_even_be_removed_by_hand_where_the_system_holds_it(locked: Path) -> None:
    """As root on a file system with that attribute; elsewhere the mode alone keeps others than the owner out."""
    try:
        os.unlink(locked / "step-000000010-g001" / "__0_0.distcp")
    except PermissionError:
        manifest.verify(str(locked), "step-000000010-g001")
    else:
        pytest.skip("this user or file system has no immutable files")
