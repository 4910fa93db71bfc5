from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dougong.errors import CheckpointDamaged
from dougong.run.capture import write_snapshot
from dougong.run.dcp_read import read_metadata, read_state
from dougong.run.dcp_shard import write_metadata, write_shard
from dougong.run.manifest import FileRecord, FsspecPlace, ItemRecord, LocalPlace, Place, storage_at
from dougong.run.sharding import Sharding
from dougong.run.snapshot import SnapshotFiles
from dougong.run.state import read_tree
from dougong.run.tree import dismantle
from tests.run import made_training as made

ALONE = "ignore:torch.distributed is disabled:UserWarning"


def shards(
    buffers: Sequence[memoryview], directory: str, *, place: Place | None = None
) -> list[tuple[tuple[FileRecord, ...], tuple[ItemRecord, ...]]]:
    """A durable checkpoint of as many ranks as there are buffers; what each rank wrote."""
    place = place or LocalPlace()
    written = [write_shard(buffer, place=place, directory=directory, rank=rank) for rank, buffer in enumerate(buffers)]
    write_metadata([item for _, items in written for item in items], place=place, directory=directory)
    return written


def tree_buffer(
    tree: dict[str, Any], prefix: Path, *, rank: int = 0, world_size: int = 1, is_replicated: bool = True
) -> memoryview:
    files = SnapshotFiles(prefix)
    ranks = range(world_size) if is_replicated else None
    sharding = Sharding({}, rank=rank, world_size=world_size, replicated_over=ranks)
    index, num_bytes = write_snapshot(files, tree, step=1, generation=1, world_size=world_size, sharding=sharding)
    return files.buffer(index)[:num_bytes]


def trained_buffers(parts: dict[str, Any], root: Path, *, world_size: int = 2, data: Any = None) -> list[memoryview]:
    """What each rank of a replicated job has in memory."""
    return [
        made.snapshot(parts, root / f"rank-{rank}", data=data, rank=rank, world_size=world_size)[1]
        for rank in range(world_size)
    ]


def as_dcp_has_it(parts: dict[str, Any]) -> dict[str, Any]:
    """The state under the names that torch.distributed.checkpoint gives it."""
    optimizer = get_optimizer_state_dict(parts["model"], parts["optimizer"])
    return {**{name: part.state_dict() for name, part in parts.items()}, "optimizer": optimizer}


def fingerprint(tree: Any) -> Any:
    """A tree as plain values that compare bitwise."""
    skeleton, leaves = dismantle(tree, is_leaf=lambda value: hasattr(value, "tobytes") or torch.is_tensor(value))

    def content(value: Any) -> bytes:
        return (
            bytes(value.contiguous().reshape(-1).view(torch.uint8).tolist())
            if torch.is_tensor(value)
            else value.tobytes()
        )

    return skeleton, [
        (leaf.path, str(leaf.value.dtype), tuple(leaf.value.shape), content(leaf.value)) for leaf in leaves
    ]


@pytest.fixture
def trained() -> dict[str, Any]:
    parts = made.parts()
    made.train(parts, num_steps=3)
    return parts


@pytest.fixture
def directory(trained: dict[str, Any], tmp_path: Path) -> str:
    """A durable checkpoint that two ranks of a replicated job wrote."""
    shards(trained_buffers(trained, tmp_path), str(tmp_path / "step"))
    return str(tmp_path / "step")


@pytest.mark.filterwarnings(ALONE)
def test_plain_dcp_reads_model_optimizer_and_scheduler_bitwise(trained: dict[str, Any], directory: str) -> None:
    other = made.parts(seed=5)
    made.train(other, num_steps=1)
    got, expected = as_dcp_has_it(other), as_dcp_has_it(trained)
    load(got, checkpoint_id=directory, no_dist=True)
    for name in trained:
        assert fingerprint(dict(got[name])) == fingerprint(dict(expected[name])), name


@pytest.mark.filterwarnings(ALONE)
def test_dcps_own_converter_gives_the_nested_state(trained: dict[str, Any], directory: str, tmp_path: Path) -> None:
    dcp_to_torch_save(directory, tmp_path / "one.pt")
    got = torch.load(tmp_path / "one.pt", weights_only=True)
    expected = as_dcp_has_it(trained)["optimizer"]
    assert got["optimizer"]["param_groups"] == expected["param_groups"]
    assert got["optimizer"]["state"]["0.weight"]["exp_avg"].equal(expected["state"]["0.weight"]["exp_avg"])


@pytest.mark.filterwarnings(ALONE)
def test_keys_are_the_ones_that_dcp_itself_would_write(trained: dict[str, Any], directory: str, tmp_path: Path) -> None:
    save(as_dcp_has_it(trained), checkpoint_id=tmp_path / "own", no_dist=True)
    own = read_metadata(place=LocalPlace(), directory=str(tmp_path / "own"))
    ours = read_metadata(place=LocalPlace(), directory=directory)
    assert ours.planner_data == own.planner_data
    assert ours.state_dict_metadata == own.state_dict_metadata


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_reads_the_very_tree_that_was_saved(rank: int, trained: dict[str, Any], tmp_path: Path) -> None:
    data = {"epoch": 2, "order": [3, 1, 2], "at": torch.arange(3)}
    buffers = trained_buffers(trained, tmp_path, data=data)
    shards(buffers, str(tmp_path / "step"))
    got = read_state(place=LocalPlace(), directory=str(tmp_path / "step"), rank=rank)
    assert fingerprint(got) == fingerprint(read_tree(buffers[rank]))


def test_a_replicated_tensor_is_written_by_one_rank_and_the_bytes_are_shared_out(tmp_path: Path) -> None:
    tree = {"model": {f"w{i}": torch.rand(1000) for i in range(12)}}
    buffers = [tree_buffer(tree, tmp_path / f"r{rank}", rank=rank, world_size=3) for rank in range(3)]
    written = shards(buffers, str(tmp_path / "step"))
    names = [item.fqn for _, items in written for item in items]
    assert len(names) == len(set(names)) == 12
    assert [len(items) for _, items in written] == [4, 4, 4]


def test_ranks_that_differ_keep_their_own(tmp_path: Path) -> None:
    trees = [{"model": {"w": torch.full((3,), float(rank))}, "rng": {"n": rank}} for rank in range(2)]
    buffers = [
        tree_buffer(tree, tmp_path / f"r{rank}", rank=rank, world_size=2, is_replicated=False)
        for rank, tree in enumerate(trees)
    ]
    shards(buffers, str(tmp_path / "step"))
    for rank, tree in enumerate(trees):
        got = read_state(place=LocalPlace(), directory=str(tmp_path / "step"), rank=rank)
        assert fingerprint(got) == fingerprint(tree)


def test_names_that_flatten_alike_are_not_mixed_up(tmp_path: Path) -> None:
    tree = {
        "ema": {1: torch.ones(2), "1": torch.zeros(2), "a.b": torch.ones(3), "a": {"b": torch.zeros(3)}},
        "count": {0: 7, "0": torch.ones(1)},
    }
    shards(
        [tree_buffer(tree, tmp_path / f"r{rank}", rank=rank, world_size=2) for rank in range(2)], str(tmp_path / "step")
    )
    for rank in range(2):
        got = read_state(place=LocalPlace(), directory=str(tmp_path / "step"), rank=rank)
        assert fingerprint(got) == fingerprint(tree)


def test_the_records_name_size_and_checksum_of_what_is_on_disk(trained: dict[str, Any], tmp_path: Path) -> None:
    import xxhash

    for files, _ in shards(trained_buffers(trained, tmp_path), str(tmp_path / "step")):
        for record in files:
            content = (tmp_path / "step" / record.name).read_bytes()
            assert (record.num_bytes, record.xxh3) == (len(content), xxhash.xxh3_128_hexdigest(content))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("protocol", ["memory", "local"])
def test_the_same_through_fsspec(protocol: str, trained: dict[str, Any], tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    if protocol == "memory":
        place, root = storage_at("memory://checkpoints")
    else:
        # as an object store: through fsspec's interface, though the bytes are on this disk
        place, root = FsspecPlace(fsspec.filesystem("file")), str(tmp_path)
    buffers = trained_buffers(trained, tmp_path)
    shards(buffers, f"{root}/step", place=place)
    got = read_state(place=place, directory=f"{root}/step", rank=1)
    assert fingerprint(got) == fingerprint(read_tree(buffers[1]))
    place.remove_tree(f"{root}/step")


class _Evil:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def _hidden_in_metadata(evil: object) -> Metadata:
    return Metadata(state_dict_metadata={}, planner_data=evil, storage_data={})


@pytest.mark.parametrize("wrap", [lambda evil: evil, _hidden_in_metadata], ids=["alone", "inside-metadata"])
@pytest.mark.parametrize(
    "call",
    [
        (os.system, "touch evil"),
        (eval, "open('evil', 'w')"),
        (open, "evil", "w"),
        (getattr, "text", "upper"),
        (torch.load, "evil"),
        (torch.ones, 3),
        (torch.tensor, [1]),
        (torch.serialization.load, "evil"),
        (io.FileIO, "evil", "w"),
        (Path.touch, Path("evil")),
        (FileSystemReader, "evil"),
        (__import__, "subprocess"),
    ],
    ids=lambda call: getattr(call[0], "__qualname__", str(call[0])),
)
def test_a_pickle_that_calls_anything_but_dcps_own_is_refused(
    call: tuple[Any, ...], wrap: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(wrap(_Evil(*call))))
    with pytest.raises(CheckpointDamaged) as caught:
        read_metadata(place=LocalPlace(), directory=str(tmp_path))
    assert "no place in DCP metadata" in caught.value.reason
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("name", ["Metadata.__init__", "dataclass", "os.system", "_version.torch"])
def test_dotted_and_other_names_of_dcps_module_are_refused(name: str, tmp_path: Path) -> None:
    module = "torch.distributed.checkpoint.metadata"
    stack_global = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name)) + b"\x93."
    (tmp_path / ".metadata").write_bytes(stack_global)
    with pytest.raises(CheckpointDamaged, match="no place"):
        read_metadata(place=LocalPlace(), directory=str(tmp_path))


@pytest.mark.parametrize("value", [3, {}, None, Metadata(state_dict_metadata={})], ids=str)
def test_a_pickle_of_something_else_is_not_metadata(value: object, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(value))
    with pytest.raises(CheckpointDamaged, match="not DCP metadata"):
        read_metadata(place=LocalPlace(), directory=str(tmp_path))


@pytest.mark.parametrize("path", ["../secret", "/etc/hostname", "..", ".metadata", "a/b"])
def test_a_tensor_outside_of_its_checkpoint_is_not_read(path: str, directory: str) -> None:
    metadata = read_metadata(place=LocalPlace(), directory=directory)
    for info in metadata.storage_data.values():
        info.relative_path = path
    Path(directory, ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointDamaged, match="lies outside of it"):
        read_state(place=LocalPlace(), directory=directory, rank=0)


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_bytes_are_told_as_damage_and_nothing_else(data: st.DataObject, directory: str) -> None:
    """Read without its manifest, a flipped byte may go unseen; but it is never another kind of error."""
    victim = Path(directory, data.draw(st.sampled_from([".metadata", "rank-0.state", "__0_0.distcp"])))
    whole = victim.read_bytes()
    broken = bytearray(whole)
    broken[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    victim.write_bytes(broken[: data.draw(st.sampled_from([len(whole), len(whole) // 2]))])
    try:
        read_state(place=LocalPlace(), directory=directory, rank=0)
    except CheckpointDamaged:
        pass
    finally:
        victim.write_bytes(whole)


@pytest.mark.parametrize("name", [".metadata", "rank-0.state", "__1_0.distcp"])
def test_a_missing_file_is_damage(name: str, directory: str) -> None:
    Path(directory, name).unlink()
    with pytest.raises(CheckpointDamaged):
        read_state(place=LocalPlace(), directory=directory, rank=0)


def test_a_directory_is_never_written_twice(trained: dict[str, Any], directory: str, tmp_path: Path) -> None:
    _, buffer = made.snapshot(trained, tmp_path / "again")
    with pytest.raises(FileExistsError):
        shards([buffer], directory)


def test_no_rank_state_holds_a_pickle(directory: str) -> None:
    content = Path(directory, "rank-0.state").read_bytes()
    assert msgspec.msgpack.decode(content)
