"""Copies beside training: what is fenced, what is taken at once, and what is noticed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: train)")

from torch import nn  # noqa: E402

from dougong.run.capture import Capture, fenced_storages  # noqa: E402
from dougong.run.copier import Copier, CopyJob, Done  # noqa: E402
from dougong.run.put_in import move_out, tree_in_place  # noqa: E402
from dougong.run.snapshot import Slot, SnapshotFiles  # noqa: E402
from dougong.run.state import Progress, gather, put_back  # noqa: E402


def made(seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer)
    return model, optimizer


def train(model: Any, optimizer: Any) -> None:
    model(torch.rand(6, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def tree_of(model: Any, optimizer: Any, *, step: int = 1) -> dict[str, Any]:
    return gather({"model": model, "optimizer": optimizer}, data=None, progress=Progress(step=step, num_tokens=0))


def capture_of(model: Any, optimizer: Any) -> Capture:
    return Capture(tree_of(model, optimizer), fenced=fenced_storages({"model": model, "optimizer": optimizer}))


def copy(files: SnapshotFiles, capture: Capture, *, step: int = 1, lived_in: Slot | None = None) -> Done:
    copier, found = Copier(files), list[Done]()
    copier.begin(
        CopyJob(capture=capture, step=step, generation=1, world_size=1, on_done=found.append, lived_in=lived_in)
    )
    copier.wait()
    return found[0]


def test_what_changes_outside_the_optimizer_is_taken_at_once_and_the_rest_later(tmp_path: Path) -> None:
    model, optimizer = made()
    capture = capture_of(model, optimizer)
    running = model[1].running_mean.clone()
    model[1].running_mean.add_(1.0)  # as the next forward pass does
    files = SnapshotFiles(tmp_path / "rank-0")
    slot = copy(files, capture).slot
    assert slot is not None
    tree = tree_in_place(files.read_slot(slot), {}, is_adopted=False)
    assert torch.equal(tree["model"]["1.running_mean"], running)
    assert torch.equal(tree["model"]["0.weight"], model[0].weight)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, _: model[0].weight.detach().mul_(2.0),
        lambda _, optimizer: next(iter(optimizer.state.values()))["exp_avg"].zero_(),
    ],
)
def test_a_parameter_changed_during_the_copy_makes_no_snapshot(
    change: Callable[[Any, Any], object], tmp_path: Path
) -> None:
    model, optimizer = made()
    capture = capture_of(model, optimizer)
    change(model, optimizer)
    files = SnapshotFiles(tmp_path / "rank-0")
    done = copy(files, capture)
    assert done.slot is None and done.is_changed and "was changed while it was copied" in done.reason
    assert files.slots() == ()


def test_without_an_optimizer_of_torch_nothing_is_left_for_later() -> None:
    model, _ = made()
    tree = gather({"model": model}, data=None, progress=Progress(step=1, num_tokens=0))
    assert not Capture(tree, fenced=fenced_storages({"model": model})).is_overlapped


class SlowCapture:
    """Stands for a large state: its copy goes on until it is let go."""

    num_bytes = 64

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def write(self, _buffer: memoryview, **_: Any) -> None:
        self.let_go.wait(30)

    def changed_meanwhile(self) -> str:
        return ""


def test_the_fence_holds_until_the_copy_is_done_and_tells_how_long_it_held(tmp_path: Path) -> None:
    files, slow, passed = SnapshotFiles(tmp_path / "rank-0"), SlowCapture(), threading.Event()
    copier = Copier(files)
    job: Any = CopyJob(capture=slow, step=1, generation=1, world_size=1, on_done=lambda _: None)  # type: ignore[arg-type]
    copier.begin(job)

    def step() -> None:
        copier.fence()
        passed.set()

    thread = threading.Thread(target=step)
    thread.start()
    assert not passed.wait(0.05)
    slow.let_go.set()
    thread.join(30)
    copier.wait()
    assert passed.is_set() and copier.take_fence_ns() > 0 and copier.take_fence_ns() == 0
    assert [slot.step for slot in files.slots()] == [1]


def test_no_memory_is_told_and_the_optimizer_goes_on(tmp_path: Path) -> None:
    model, optimizer = made()
    files = SnapshotFiles(tmp_path / "missing" / "rank-0")
    done = copy(files, capture_of(model, optimizer))
    assert done.slot is None and "no shared memory" in done.reason


def test_live_tensors_are_filled_in_place_and_stay_the_same_objects(tmp_path: Path) -> None:
    model, optimizer = made()
    files = SnapshotFiles(tmp_path / "rank-0")
    slot = copy(files, capture_of(model, optimizer)).slot
    assert slot is not None
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    average = next(iter(optimizer.state.values()))["exp_avg"]
    expected_average, weight, address = average.clone(), model[0].weight, model[0].weight.data_ptr()
    train(model, optimizer)
    parts = {"model": model, "optimizer": optimizer}
    put_back(tree_in_place(files.read_slot(slot), parts, is_adopted=False), parts)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert model[0].weight is weight and weight.data_ptr() == address
    assert next(iter(optimizer.state.values()))["exp_avg"] is average and torch.equal(average, expected_average)


def test_a_new_process_lives_in_the_snapshot_and_another_buffer_takes_its_place(tmp_path: Path) -> None:
    prefix = tmp_path / "rank-0"
    model, optimizer = made()
    copy(SnapshotFiles(prefix), capture_of(model, optimizer))
    expected = {name: value.clone() for name, value in model.state_dict().items()}

    newer, files = made(seed=9), SnapshotFiles(prefix)
    fresh = torch.optim.Adam(newer[0].parameters(), lr=0.1)
    parts = {"model": newer[0], "optimizer": fresh}
    slot = files.find(step=1)
    buffer = files.adopt(slot)
    put_back(tree_in_place(buffer, parts, is_adopted=True), parts)
    whole = torch.frombuffer(buffer, dtype=torch.uint8)
    first, last = whole.data_ptr(), whole.data_ptr() + whole.numel()
    assert all(first <= parameter.data_ptr() < last for parameter in newer[0].parameters())
    assert all(first <= state["exp_avg"].data_ptr() < last for state in fresh.state.values())
    assert not first <= newer[0][1].running_mean.data_ptr() < last, "the next forward pass changes it unfenced"

    again = Capture(tree_of(newer[0], fresh), fenced=fenced_storages(parts))
    done = copy(files, again, lived_in=slot)
    assert done.slot is not None and done.slot.index != slot.index
    train(newer[0], fresh)
    assert [found.index for found in SnapshotFiles(prefix).slots()] == [done.slot.index]
    tree = tree_in_place(SnapshotFiles(prefix).read(step=1), {}, is_adopted=False)
    assert all(torch.equal(tree["model"][name], value) for name, value in expected.items())
    indices = {copy(files, Capture(tree_of(newer[0], fresh), fenced=frozenset()), step=step).slot for step in (2, 3, 4)}
    assert slot.index not in {found.index for found in indices if found is not None}


def test_tensors_can_move_out_of_the_snapshot_again(tmp_path: Path) -> None:
    model, optimizer = made()
    files = SnapshotFiles(tmp_path / "rank-0")
    copy(files, capture_of(model, optimizer))
    parts = {"model": model, "optimizer": optimizer}
    buffer = files.adopt(files.find(step=1))
    put_back(tree_in_place(buffer, parts, is_adopted=True), parts)
    move_out(parts, buffer)
    files.give_back()
    whole = torch.frombuffer(buffer, dtype=torch.uint8)
    assert not any(
        whole.data_ptr() <= parameter.data_ptr() < whole.data_ptr() + whole.numel() for parameter in model.parameters()
    )


def test_state_that_could_not_be_moved_out_again_is_copied(tmp_path: Path) -> None:
    """LBFGS keeps lists of tensors, which `move_out` does not look into."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    inputs = torch.rand(6, 4)

    def loss() -> Any:
        optimizer.zero_grad()
        value = model(inputs).square().mean()
        value.backward()
        return value

    optimizer.step(loss)
    files = SnapshotFiles(tmp_path / "rank-0")
    copy(files, capture_of(model, optimizer))
    fresh = torch.optim.LBFGS(model.parameters(), max_iter=4)
    parts = {"model": model, "optimizer": fresh}
    buffer = files.adopt(files.find(step=1))
    put_back(tree_in_place(buffer, parts, is_adopted=True), parts)
    whole = torch.frombuffer(buffer, dtype=torch.uint8)
    first, last = whole.data_ptr(), whole.data_ptr() + whole.numel()
    (state,) = fresh.state.values()
    directions = state["old_dirs"]
    assert directions and not any(first <= tensor.data_ptr() < last for tensor in directions)
    move_out(parts, buffer)
    files.give_back()
    assert not any(first <= parameter.data_ptr() < last for parameter in model.parameters())


def test_a_copy_that_nobody_wants_any_more_is_broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dougong.run.capture as capture_module

    model, optimizer = made()
    files, found = SnapshotFiles(tmp_path / "rank-0"), list[Done]()
    slot = copy(files, capture_of(model, optimizer)).slot
    assert slot is not None
    copier, begun, go_on = Copier(files), threading.Event(), threading.Event()
    whole = capture_module.copy_in

    def slowly(*arguments: Any, **rest: Any) -> None:
        whole(*arguments, **rest)
        begun.set()
        go_on.wait()

    monkeypatch.setattr(capture_module, "copy_in", slowly)
    wanted = CopyJob(capture=capture_of(model, optimizer), step=2, generation=1, world_size=1, on_done=found.append)
    copier.begin(wanted)
    begun.wait()
    threading.Timer(0.05, go_on.set).start()
    copier.give_up()
    (done,) = found
    assert done.slot is None and done.is_given_up
    assert files.slots() == (slot,), "the one before stays"
    copier.begin(wanted)
    copier.wait()
    assert found[1].slot is not None, "the next one is wanted again"


@pytest.mark.parametrize("offset_bytes", [None, 9, 5000, -1])
def test_a_snapshot_is_compared_while_it_is_put_back(offset_bytes: int | None, tmp_path: Path) -> None:
    from dougong.errors import CheckpointDamaged
    from dougong.run.saved_state import verified_tree

    model = nn.Linear(1200, 1100)  # more values than are copied at a time
    files, parts = SnapshotFiles(tmp_path / "rank-0"), {"model": model}
    tree = gather(parts, data=None, progress=Progress(step=1, num_tokens=0))
    slot = copy(files, Capture(tree, fenced=frozenset())).slot
    assert slot is not None
    expected = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    if offset_bytes is None:
        put_back(verified_tree(files, slot, parts), parts)
        assert torch.equal(model.weight, expected)
        return
    files.buffer(slot.index)[: slot.num_bytes][offset_bytes] ^= 1
    with pytest.raises(CheckpointDamaged, match="checksum"):
        verified_tree(files, slot, parts)
    assert files.slots() == (), "it is not chosen again"
