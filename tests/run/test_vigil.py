from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dougong.event.kinds import CorruptionSuspected, Placed, ReplicasCompared, SnapshotRefused, StragglerNamed
from dougong.run.history import JobHistory
from dougong.run.letters import Fingerprinted, LossFoundBad, SaveRefused, Skip
from dougong.run.page import StepRecord
from dougong.run.settings import Policy
from dougong.run.vigil import News, Vigil
from dougong.run.wire import Restore
from tests.run.made_settings import settings_at

NODES = ("a", "b", "c")


def vigil_at(root: Path, *, world_size: int = 3, history: JobHistory | None = None, **policy: Any) -> Vigil:
    settings = msgspec.structs.replace(settings_at(root), policy=Policy(**policy))
    vigil = Vigil(settings, history or JobHistory(), ledger=root / "ledger")
    vigil.begin_generation(tuple(Placed(rank=rank, local_rank=0, component=NODES[rank]) for rank in range(world_size)))
    return vigil


def hear(vigil: Vigil, letter: Any, *, spares: tuple[str, ...] = (), saved_step: int = 0) -> News:
    return vigil.hear(letter, saved_step=saved_step, spares=spares, now_s=0.0)


def prints(vigil: Vigil, step: int, *digests: str, spares: tuple[str, ...] = ()) -> News:
    for rank, digest in enumerate(digests):
        news = hear(vigil, Fingerprinted(generation=1, rank=rank, step=step, digest=digest), spares=spares)
    return news


def bad(step: int) -> LossFoundBad:
    return LossFoundBad(generation=1, rank=1, step=step, reason="the loss is nan")


def look(vigil: Vigil, **changes: Any) -> News:
    return vigil.look(**{"last_step": 99, "durable_step": 0, "spares": (), "now_s": 1.0, **changes})


def test_a_bad_loss_holds_everybodys_checkpoints_for_two_intervals(tmp_path: Path) -> None:
    vigil = vigil_at(tmp_path)
    assert hear(vigil, bad(30)).hold_saves_until == 40
    news = hear(vigil, SaveRefused(generation=1, rank=1, step=35, reason="the loss is nan"))
    assert news.hold_saves_until == 45
    assert isinstance(news.events[0], SnapshotRefused)
    assert look(vigil) == News(), "by default nothing else follows"


def test_roll_back_and_skip_is_a_loss_of_software_whose_batches_are_passed_over(tmp_path: Path) -> None:
    vigil = vigil_at(tmp_path, bad_loss="roll-back-and-skip")
    hear(vigil, bad(30))
    news = look(vigil)
    assert [(loss.rank, loss.component, loss.cause_class) for loss in news.losses] == [(1, "b", "software")]
    assert news.give_up == ""
    assert not vigil.trusts(1, 30) and vigil.trusts(1, 29)
    assert len(vigil.before_start().events) == 1
    assert vigil.completed(Restore(source="memory", step=28)).skips == (Skip(30, 1),)


def test_stop_gives_the_job_up(tmp_path: Path) -> None:
    vigil = vigil_at(tmp_path, bad_loss="stop")
    hear(vigil, bad(30))
    assert "the loss is nan in step 30" in look(vigil).give_up
    assert vigil.before_start().events == ()


def test_a_new_controller_knows_what_is_skipped_and_what_is_not_trusted(tmp_path: Path) -> None:
    history = JobHistory(skips=(Skip(7, 2),), agreed=(3, 50))
    vigil = vigil_at(tmp_path, history=history)
    assert vigil.completed(Restore(source="none")).skips == (Skip(7, 2),)
    (event,) = prints(vigil, 60, "a", "b", "b").events
    assert isinstance(event, CorruptionSuspected)
    assert (event.agreed_generation, event.agreed_step) == (3, 50)


@pytest.mark.parametrize(
    ("spares", "cordoned", "doubted"), [(("spare",), ("b",), ()), ((), (), ("b",))], ids=["spare", "none"]
)
def test_the_node_of_a_named_rank_is_swapped_or_tested_again(
    tmp_path: Path, spares: tuple[str, ...], cordoned: tuple[str, ...], doubted: tuple[str, ...]
) -> None:
    vigil = vigil_at(tmp_path)
    assert prints(vigil, 20, "x", "x", "x").events == (ReplicasCompared(generation=1, step=20),)
    news = prints(vigil, 40, "x", "y", "x", spares=spares)
    assert [loss.cause_class for loss in news.losses] == ["silent-corruption"]
    assert tuple(component for component, _ in news.cordoned) == cordoned
    assert news.doubted == doubted
    assert vigil.trusts(1, 20) and not vigil.trusts(1, 25)
    assert "not trusted" in vigil.completed(Restore(source="none", reason="newest")).reason


def test_of_two_ranks_both_nodes_are_tested_and_none_is_swapped(tmp_path: Path) -> None:
    vigil = vigil_at(tmp_path, world_size=2)
    news = prints(vigil, 20, "x", "y", spares=("spare",))
    assert (news.cordoned, news.doubted) == ((), ("a", "b"))


def straggling(vigil: Vigil) -> list[News]:
    news: list[News] = []
    for step in range(1, 40):
        for rank, compute_s in enumerate((0.1, 0.1, 0.3)):
            record = StepRecord(step, 0, 1, 0, None, None, 0, 0, round(compute_s * 1e9))
            news.append(vigil.add_steps(rank, (record,), generation=1))
    return [one for one in news if one.events]


def test_a_straggler_is_named_and_by_default_left_where_it_is(tmp_path: Path) -> None:
    vigil = vigil_at(tmp_path)
    (news,) = straggling(vigil)
    (named,) = news.events
    assert isinstance(named, StragglerNamed) and (named.rank, named.component) == (2, "c")
    assert look(vigil, durable_step=99, spares=("spare",)) == News()


def test_a_straggler_is_replaced_behind_the_next_durable_checkpoint(tmp_path: Path) -> None:
    vigil = vigil_at(tmp_path, straggler="replace")
    straggling(vigil)
    assert look(vigil, durable_step=10, spares=("spare",)) == News()
    assert look(vigil, durable_step=50) == News(), "there is no spare"
    news = look(vigil, durable_step=50, spares=("spare",))
    assert [loss.cause_class for loss in news.losses] == ["straggler"]
    assert [component for component, _ in news.cordoned] == ["c"]
    assert look(vigil, durable_step=50, spares=("spare",)) == News()
