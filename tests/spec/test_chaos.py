"""Schedules of faults: one time each, drawn from the seed alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.errors import Problems, UserError
from dougong.spec.chaos import Chaos, Fault, load_chaos, resolve
from dougong.spec.dump import dump_typed
from dougong.spec.typed import convert
from dougong.spec.yaml_source import parse_yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "chaos-default.yaml"
NODES = ("local/node-0", "local/node-1")


def read(text: str, warned: list[UserError] | None = None) -> Chaos:
    return convert(parse_yaml(text, file="chaos.yaml"), Chaos, warn=[].append if warned is None else warned.append)


def problems(text: str) -> list[tuple[str, str]]:
    with pytest.raises(Problems) as caught:
        read(text)
    return [(problem.where, problem.what) for problem in caught.value.problems]


def test_the_example_has_at_least_four_kinds_and_no_warning() -> None:
    chaos = load_chaos(EXAMPLE)
    assert len({fault.kind for fault in chaos.faults}) >= 4
    assert [fault.at_step for fault in chaos.faults] == sorted(fault.at_step or 0 for fault in chaos.faults)


def test_a_fault_has_exactly_one_time() -> None:
    found = problems("seed: 1\nfaults:\n  - {kind: kill-node}\n  - {kind: kill-node, at_step: 1, at: 2s}\n")
    assert [where for where, _ in found] == ["chaos.yaml:3 faults[0]", "chaos.yaml:4 faults[1].at"]


def test_a_target_that_a_kind_does_not_take_is_a_warning() -> None:
    warned: list[UserError] = []
    read(
        "seed: 1\nfaults: [{kind: kill-node, at_step: 1, rank: 0}, {kind: kill-controller, at_step: 1, node: x}]",
        warned,
    )
    assert [problem.what for problem in warned] == [
        "rank has no effect on kill-node",
        "node has no effect on kill-controller",
    ]


def test_an_unknown_kind_is_told_the_nearest() -> None:
    ((where, _),) = problems("seed: 1\nfaults: [{kind: kil-worker, at_step: 1}]")
    assert where == "chaos.yaml:2 faults[0].kind"


def test_a_kind_that_needs_a_number_says_which() -> None:
    found = problems("seed: 1\nfaults: [{kind: sigterm-grace, at_step: 1}, {kind: jump-clock, at_step: 1, jump_s: 0}]")
    assert [what for _, what in found] == ["sigterm-grace needs grace_s", "jump-clock needs jump_s"]


def test_only_some_kinds_last_a_while() -> None:
    warned: list[UserError] = []
    text = "seed: 1\nfaults: [{kind: fill-disk, at_step: 1, for: 2s}, {kind: kill-worker, during: recovery, for: 2s}]"
    read(text, warned)
    assert [problem.what for problem in warned] == ["for_s has no effect on kill-worker"]


def test_a_node_is_not_cut_off_from_itself() -> None:
    drawn = resolve(
        Chaos(seed=3, faults=(Fault(kind="cut-network", at_step=1, peer=NODES[0]),)), world_size=2, nodes=NODES
    )
    assert (drawn[0].node, drawn[0].peer) == (NODES[1], NODES[0])
    itself = Chaos(seed=3, faults=(Fault(kind="cut-network", at_step=1, node=NODES[0], peer=NODES[0]),))
    with pytest.raises(UserError, match="itself"):
        resolve(itself, world_size=2, nodes=NODES)


def test_without_a_node_a_clock_jumps_everywhere_and_the_node_killed_first_returns() -> None:
    faults = (Fault(kind="jump-clock", at_step=1, jump_s=-5.0), Fault(kind="return-node", at_step=2))
    assert [fault.node for fault in resolve(Chaos(seed=1, faults=faults), world_size=2, nodes=NODES)] == [None, None]


FAULTS = st.builds(
    Fault,
    kind=st.sampled_from(["kill-worker", "kill-node", "corrupt-checkpoint", "tear-checkpoint", "hang-worker"]),
    at_step=st.integers(0, 100),
    rank=st.none() | st.just("random") | st.integers(0, 3),
    node=st.none() | st.just("random") | st.sampled_from(NODES),
)
SCHEDULES = st.builds(Chaos, seed=st.integers(0, 2**64), faults=st.lists(FAULTS, max_size=6).map(tuple))


@given(SCHEDULES)
def test_the_same_seed_draws_the_same_faults(chaos: Chaos) -> None:
    drawn = resolve(chaos, world_size=4, nodes=NODES)
    assert drawn == resolve(chaos, world_size=4, nodes=NODES)
    for fault in drawn:
        assert fault.rank is None or fault.rank in range(4)
        assert fault.node is None or fault.node in NODES
        assert fault.node is not None or not fault.kind.startswith("kill-node")
        assert fault.rank is not None or not fault.kind.endswith("-worker")


@given(SCHEDULES, FAULTS)
def test_a_fault_added_at_the_end_leaves_the_others_alone(chaos: Chaos, fault: Fault) -> None:
    longer = msgspec.structs.replace(chaos, faults=(*chaos.faults, fault))
    assert resolve(longer, world_size=4, nodes=NODES)[:-1] == resolve(chaos, world_size=4, nodes=NODES)


@given(SCHEDULES)
def test_load_of_dump_is_the_same(chaos: Chaos) -> None:
    assert read(dump_typed(chaos)) == chaos


def test_a_target_that_is_not_there_is_a_mistake_of_the_user() -> None:
    wrong = (
        Fault(kind="kill-worker", at_step=1, rank=9),
        Fault(kind="kill-node", at_step=1, node="x"),
        Fault(kind="cut-network", at_step=1, peer="x"),
    )
    for fault in wrong:
        with pytest.raises(UserError, match=r"no (rank|node)"):
            resolve(Chaos(seed=1, faults=(fault,)), world_size=2, nodes=NODES)
