"""A loop that stays its own is resumed at its very next step; wrong orders of calls are named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dougong.errors import UserError
from dougong.event.kinds import JobFinished, JobStopped, RecoveryDecided
from tests.run import runs

torch = pytest.importorskip("torch", reason="torch is not installed (extra: train)")

HOOKED = Path(__file__).parent / "scripts" / "hooked.py"
SAVES = ("--memory-every", "4", "--durable-every", "12", "--no-score")


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "run"
    yield path
    runs.end_all(path)


def make_loop(**others):
    import dougong

    model = torch.nn.Linear(2, 1)
    return dougong.loop(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **others)


def test_a_plain_process_runs_the_same_loop() -> None:
    loop = make_loop(counters={"consumed": 0})
    iteration = loop.restore()
    while iteration < 3:
        loop.begin_step()
        iteration += 1
        loop.end_step(loss=1.0, tokens=5)
    loop.evaluating()
    loop.evaluating(is_over=True)
    loop.finish()
    assert (loop.num_steps, loop.job.num_tokens, loop.job.resumed_step) == (3, 15, 0)


def test_batches_go_on_over_epochs() -> None:
    loop = make_loop(data=[1, 2, 3])
    loop.restore()
    batches = loop.batches
    assert [next(batches) for _ in range(5)] == [1, 2, 3, 1, 2]


def test_a_dict_is_state_and_filled_in_place() -> None:
    from dougong.run.hooks import _DictState

    counters = {"consumed": 7, "gone": 1}
    _DictState(counters).load_state_dict({"consumed": 9})
    assert counters == {"consumed": 9}


def test_wrong_orders_are_named() -> None:
    loop = make_loop()
    with pytest.raises(UserError, match="before restore"):
        loop.begin_step()
    loop.restore()
    with pytest.raises(UserError, match="without begin_step"):
        loop.end_step()
    loop.begin_step()
    with pytest.raises(UserError, match="step 1 was not ended"):
        loop.begin_step()
    with pytest.raises(UserError, match="no data"):
        next(loop.batches)


@pytest.mark.processes
def test_a_megatron_style_loop_goes_through_faults(run_dir: Path, tmp_path: Path) -> None:
    quiet = runs.run(tmp_path / "quiet", *SAVES, script=HOOKED)
    assert quiet.code == 0, quiet.report
    assert sorted(quiet.losses()) == list(range(1, 41))
    kill = "kind: kill-worker, at_step: 10, rank: 1"
    loss = "kind: kill-node, at_step: 30, node: local/rack-01/node-02"
    chaos = runs.write_chaos(tmp_path / "chaos.yaml", kill, loss)
    options = (*SAVES, "--set", "save.peer_copies=0", "--spares", "1", "--chaos", str(chaos))
    done = runs.run(run_dir, *options, script=HOOKED)
    assert done.code == 0, done.report
    assert [event.restore_step for event in done.events(RecoveryDecided)] == [8, 24]
    for rank in (0, 1):
        assert done.losses(rank) == quiet.losses(rank), done.report
    assert done.samples() == quiet.samples(), done.report
    assert "done at 40, consumed 320, resumed at 24" in done.stdout


@pytest.mark.processes
def test_it_stops_when_asked_and_goes_on(run_dir: Path) -> None:
    process = runs.start(run_dir, *SAVES, script=HOOKED, arguments=("--train-iters", "120"))
    runs.wait_for_step(run_dir, 3)
    process.send_signal(2)
    stopped = runs.finish(process, run_dir)
    assert stopped.code == 130, stopped.report
    at = stopped.events(JobStopped)[0].step
    done = runs.finish(runs.resume(run_dir), run_dir)
    assert done.code == 0, done.report
    assert done.events(JobFinished)
    assert f"done at 120, consumed 960, resumed at {at}" in done.stdout
