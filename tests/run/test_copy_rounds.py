from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dougong.event.kinds import CheckpointRejected, CheckpointSaved, PeersChosen, Placed, WarningRaised
from dougong.run import wire
from dougong.run.copy_rounds import CopiedJob, CopyRounds, newest_complete
from dougong.run.copy_store import NO_ANCHOR, Anchor
from dougong.run.node_session import NodeSession
from dougong.run.page import Phase
from dougong.run.settings import SaveRule
from tests.run.made_settings import settings_at

A, B, SPARE = (f"local/rack-01/node-0{number}" for number in (1, 2, 3))


class Wire:
    """A connection that remembers what was said."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def send(self, message: Any) -> None:
        self.said.append(message)


class Cluster:
    """Three nodes as the controller sees them; two train, one rank each."""

    def __init__(self, tmp_path: Any, *, backend: str = "local", **save: Any) -> None:
        rule = SaveRule(**{"peer_every_s": 1.0, "peer_busy_ratio": 0.5, **save})
        settings = msgspec.structs.replace(settings_at(tmp_path), procs_per_node=1, save=rule, backend=backend)
        self.sessions = {name: NodeSession(name, is_lost=False, now_s=0.0) for name in (A, B, SPARE)}
        self.copies = CopyRounds(settings, self.sessions)
        self.job = CopiedJob(
            generation=1,
            placement=(
                Placed(rank=0, local_rank=0, component=A),
                Placed(rank=1, local_rank=0, component=B),
            ),
            is_running=True,
            is_attached=True,
            step_s=0.1,
        )
        self.now_s = 0.0
        for name in self.sessions:
            self.connect(name)
        self.reach(step=3)

    def connect(self, name: str, *, port: int = 1000, copies: tuple[wire.CopyStatus, ...] = ()) -> None:
        hello = wire.Hello(
            component=name,
            pid=1,
            address="127.0.0.1",
            free_port=1,
            workers=(),
            snapshots=(),
            courier_port=port,
            copies=copies,
        )
        self.sessions[name].open(Wire(), hello, now_s=self.now_s)  # type: ignore[arg-type]

    def reach(self, *, step: int) -> None:
        """All ranks have finished this step, as far as the controller knows."""
        for rank, name in enumerate((A, B)):
            status = wire.RankStatus(
                rank=rank,
                generation=self.job.generation,
                pid=1,
                phase=Phase.STEP,
                step=step,
                idle_s=0.0,
                quiet_s=0.0,
                activity="running",
                is_attached=True,
            )
            self.sessions[name].status = wire.Status(ranks=(status,), snapshots=())

    def hold(self, name: str, *held: tuple[int, str, int], problem: str = "") -> tuple[Any, ...]:
        """The node says that it keeps (rank, owner, step) …"""
        copies = tuple(
            wire.CopyStatus(
                owner=owner,
                snapshot=wire.SnapshotStatus(
                    rank=rank, step=step, generation=self.job.generation, world_size=2, num_bytes=10
                ),
            )
            for rank, owner, step in held
        )
        return self.copies.hear(self.sessions[name], wire.CopiesHeld(courier_port=1000, copies=copies, problem=problem))

    def look(self, *, after_s: float = 0.1) -> list[Any]:
        self.now_s += after_s
        return list(self.copies.look(self.job, now_s=self.now_s))

    def order(self, name: str) -> wire.CopyOrder:
        """The last order to a node."""
        connection: Any = self.sessions[name].connection
        return [said for said in connection.said if isinstance(said, wire.CopyOrder)][-1]

    def finish_round(self, *, step: int) -> list[Any]:
        self.hold(A, (0, A, step))
        self.hold(B, (1, B, step))
        self.hold(SPARE, (0, A, step), (1, B, step))
        return self.look()


@pytest.fixture
def cluster(tmp_path: Any) -> Cluster:
    return Cluster(tmp_path)


def test_peers_are_chosen_said_once_and_all_nodes_get_the_same_round(cluster: Cluster) -> None:
    (chosen,) = cluster.look()
    assert isinstance(chosen, PeersChosen)
    assert {keeper.owner: keeper.keepers for keeper in chosen.keepers} == {A: (SPARE,), B: (SPARE,)}
    orders = [cluster.order(name) for name in (A, B)]
    assert {(order.round, order.from_step) for order in orders} == {(1, 7)}, "0.3 s ahead, at 0.1 s a step"
    assert [peer.component for peer in orders[0].peers] == [SPARE]
    assert cluster.order(SPARE).round == 0, "it has nothing to copy"
    assert cluster.look() == []


def test_the_plan_waits_for_a_courier_that_is_late_but_not_for_ever(cluster: Cluster) -> None:
    cluster.connect(SPARE, port=0)
    assert cluster.look() == []
    assert cluster.look(after_s=4.0) == []
    (chosen,) = cluster.look(after_s=2.0)
    assert {keeper.owner: keeper.keepers for keeper in chosen.keepers} == {A: (B,), B: (A,)}
    cluster.connect(SPARE)
    assert cluster.look() == [], "it comes into the plan, and what was chosen stays"


def test_nodes_played_on_one_host_are_not_warned_of_a_common_rack_but_real_ones_are(tmp_path: Any) -> None:
    assert not any(isinstance(event, WarningRaised) for event in Cluster(tmp_path).look())
    (warning,) = [e for e in Cluster(tmp_path, backend="joined").look() if isinstance(e, WarningRaised)]
    assert "same failure group" in warning.text


def test_a_round_is_finished_when_every_rank_is_kept_at_home_and_by_its_keeper(cluster: Cluster) -> None:
    cluster.look()
    cluster.hold(A, (0, A, 10))
    cluster.hold(SPARE, (0, A, 10))
    assert cluster.look() == []
    assert cluster.order(A).anchor_step == 0
    (saved,) = cluster.finish_round(step=10)
    assert isinstance(saved, CheckpointSaved)
    assert (saved.tier, saved.step, saved.num_bytes, saved.stall_s) == ("peer", 10, 20, 0.0)
    assert all(cluster.order(name).anchor_step == 10 for name in (A, B, SPARE))


def test_the_next_round_waits_and_begins_behind_the_anchor(cluster: Cluster) -> None:
    cluster.look()
    cluster.finish_round(step=30)
    cluster.look(after_s=0.5)
    assert cluster.order(A).round == 0
    cluster.look(after_s=1.0)
    assert (cluster.order(A).round, cluster.order(A).from_step) == (2, 34)


def test_a_round_that_took_long_is_followed_by_a_pause_as_long_as_the_busy_ratio_asks(cluster: Cluster) -> None:
    cluster.look()
    cluster.hold(A, (0, A, 10))
    cluster.look()
    cluster.look(after_s=20.0)
    cluster.finish_round(step=10)
    cluster.look(after_s=19.0)
    assert cluster.order(A).round == 0
    cluster.look(after_s=2.0)
    assert cluster.order(A).round == 2


def test_ranks_that_took_different_steps_make_a_new_round_and_no_anchor(cluster: Cluster) -> None:
    cluster.look()
    cluster.hold(A, (0, A, 10))
    cluster.hold(B, (1, B, 15))
    cluster.hold(SPARE, (0, A, 10), (1, B, 15))
    assert cluster.look() == []
    assert (cluster.order(A).round, cluster.order(A).anchor_step) == (0, 0)
    cluster.look(after_s=1.1)
    assert cluster.order(A).round == 2


def test_a_problem_ends_the_round_and_is_told_once(cluster: Cluster) -> None:
    cluster.look()
    (warning,) = cluster.hold(A, problem="rank 0, step 10 to x: [Errno 111] Connection refused")
    assert isinstance(warning, WarningRaised) and "Connection refused" in warning.text
    cluster.look()
    assert cluster.order(A).round == 0
    assert cluster.hold(A, problem="rank 0, step 15 to x: [Errno 111] Connection refused") == ()


def test_no_round_begins_while_a_courier_is_missing_and_its_node_stays_in_the_plan(cluster: Cluster) -> None:
    cluster.look()
    cluster.finish_round(step=10)
    cluster.connect(SPARE, port=0)
    assert cluster.look(after_s=5.0) == []
    assert cluster.order(A).round == 0
    cluster.connect(SPARE)
    assert cluster.look() == []
    assert cluster.order(A).round == 2


def test_a_lost_keepers_copies_move_and_the_anchor_stays(cluster: Cluster) -> None:
    cluster.look()
    cluster.finish_round(step=10)
    cluster.sessions[SPARE].is_lost = True
    cluster.sessions[SPARE].lose_connection(now_s=1.0)
    (chosen,) = cluster.look()
    assert {keeper.owner: keeper.keepers for keeper in chosen.keepers} == {A: (B,), B: (A,)}
    assert cluster.order(A).anchor_step == 10
    assert {copy.courier.component for copy in cluster.copies.copies()} == {A, B}


def test_a_controller_that_is_started_anew_finds_the_anchor_and_the_keepers(tmp_path: Any) -> None:
    first = Cluster(tmp_path)
    first.look()
    first.finish_round(step=10)
    second = Cluster(tmp_path)
    for name, session in first.sessions.items():
        second.connect(name, copies=session.copies)
    second.reach(step=40)
    second.look()
    assert second.order(A).anchor_step == 10
    assert second.order(A).peers == first.order(A).peers or second.order(A).peers[0].component == SPARE


def test_a_new_generation_leaves_the_round_and_keeps_the_anchor(cluster: Cluster) -> None:
    cluster.look()
    cluster.finish_round(step=10)
    cluster.look(after_s=2.0)
    assert cluster.order(A).round == 2
    cluster.job = msgspec.structs.replace(cluster.job, generation=2)
    cluster.look()
    assert (cluster.order(A).round, cluster.order(A).anchor_generation, cluster.order(A).anchor_step) == (0, 1, 10)
    cluster.reach(step=11)
    cluster.look()
    assert (cluster.order(A).round, cluster.order(A).generation, cluster.order(A).from_step) == (3, 2, 15)


def test_there_are_no_rounds_for_a_job_that_does_not_run(cluster: Cluster) -> None:
    cluster.job = msgspec.structs.replace(cluster.job, is_running=False)
    cluster.look()
    assert cluster.order(A).round == 0


def test_a_job_that_saves_nothing_has_no_couriers_and_the_first_order_has_them_started(tmp_path: Any) -> None:
    cluster = Cluster(tmp_path)
    for name in (A, B, SPARE):
        cluster.connect(name, port=0)
    cluster.job = msgspec.structs.replace(cluster.job, is_attached=False)
    assert cluster.look() == []
    connections: list[Any] = [session.connection for session in cluster.sessions.values()]
    assert [connection.said for connection in connections] == [[], [], []]
    cluster.job = msgspec.structs.replace(cluster.job, is_attached=True)
    assert cluster.look() == []
    assert [cluster.order(name).round for name in (A, B, SPARE)] == [0, 0, 0]


def test_switched_off_nothing_is_said(tmp_path: Any) -> None:
    cluster = Cluster(tmp_path, peer_copies=0)
    assert cluster.look() == []
    connection: Any = cluster.sessions[A].connection
    assert connection.said == []


def test_a_copy_that_could_not_be_had_is_rejected_with_the_reason(cluster: Cluster) -> None:
    origin = wire.Origin(rank=1, courier=wire.CourierAddress(component=SPARE, host="h", port=1))
    restore = wire.Restore(source="peer", step=10, generation=1, origins=(origin,))
    event = cluster.copies.refuse(origin, restore, reason="checksum differs")
    assert event == CheckpointRejected(step=10, tier="peer", path=SPARE, reason="checksum differs")
    (bad,) = cluster.copies.refused
    assert (bad.component, bad.rank, bad.generation, bad.step) == (SPARE, 1, 1, 10)


def test_a_copy_of_a_state_that_is_not_trusted_is_not_offered(cluster: Cluster) -> None:
    cluster.hold(A, (0, A, 10), (0, A, 20))
    offered = cluster.copies.copies(trusts=lambda generation, step: step <= 15)
    assert [copy.snapshot.step for copy in offered] == [10]


def test_the_anchor_is_the_newest_state_that_every_rank_has_somewhere(cluster: Cluster) -> None:
    assert newest_complete((), world_size=2) == NO_ANCHOR
    cluster.hold(A, (0, A, 10), (0, A, 20))
    cluster.hold(SPARE, (1, B, 10))
    assert newest_complete(cluster.copies.copies(), world_size=2) == Anchor(1, 10)
    cluster.hold(SPARE, (1, B, 10), (1, B, 20))
    assert newest_complete(cluster.copies.copies(), world_size=2) == Anchor(1, 20)
