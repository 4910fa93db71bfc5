from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dougong.event.kinds import NodeQuarantined, PreflightDone
from dougong.run.fitness import Fitness, to_quarantine, untested_at_start
from dougong.run.history import JobHistory
from dougong.run.preflight import BadNode
from dougong.run.wire import Preflighted
from tests.run.made_settings import settings_at

SLOW = BadNode(component="a", reason="slow", is_usable=True)
WRONG = BadNode(component="b", reason="wrong")


def test_a_slow_node_goes_only_if_another_can_take_its_place() -> None:
    assert to_quarantine((SLOW,), usable=("a", "b", "c"), num_needed=2) == (SLOW,)
    assert to_quarantine((SLOW,), usable=("a", "b"), num_needed=2) == ()


def test_a_node_that_computes_wrongly_goes_even_if_the_job_then_cannot_run() -> None:
    assert to_quarantine((WRONG,), usable=("a", "b"), num_needed=2) == (WRONG,)


def test_the_spare_goes_to_the_worse_of_two() -> None:
    assert to_quarantine((SLOW, WRONG), usable=("a", "b", "c"), num_needed=2) == (WRONG,)


def test_a_node_is_quarantined_once_and_tested_again_before_it_returns() -> None:
    fitness = Fitness()
    assert fitness.quarantine("a", "wrong") == (NodeQuarantined(component="a", reason="wrong"),)
    assert fitness.quarantine("a", "wrong") == ()
    assert fitness.quarantined == {"a"}
    fitness.readmit("a")
    assert (fitness.quarantined, fitness.untested) == (frozenset(), ("a",))


def test_a_tested_node_is_not_tested_again() -> None:
    fitness = Fitness(untested=("a", "b"))
    orders = fitness.begin({"a": "host"}, now_s=0.0)
    assert [component for component, _ in orders] == ["a"]
    fitness.hear("a", Preflighted(serial=orders[0][1].serial, stage=0, free_port=1, flop_per_s=1e9))
    news = fitness.proceed(now_s=1.0, usable=("a", "b"), num_needed=1)
    assert news.is_over
    assert isinstance(news.events[0], PreflightDone)
    assert fitness.untested == ("b",)


@pytest.mark.parametrize(("wants", "is_done", "num"), [(True, False, 3), (True, True, 0), (False, False, 0)])
def test_a_start_tests_all_nodes_once_if_wanted(tmp_path: Path, wants: bool, is_done: bool, num: int) -> None:
    settings = msgspec.structs.replace(settings_at(tmp_path), wants_preflight=wants)
    history = JobHistory(is_preflight_done=is_done)
    assert len(untested_at_start(settings, history, is_resume=False)) == num


def test_a_resume_tests_the_nodes_that_come_back(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    lost = settings.nodes[1]
    assert untested_at_start(settings, JobHistory(lost_nodes=frozenset({lost})), is_resume=True) == (lost,)


def test_a_node_under_test_is_known_to_be_until_the_verdict() -> None:
    fitness = Fitness(untested=("a",))
    assert not fitness.is_testing
    orders = fitness.begin({"a": "host"}, now_s=0.0)
    assert fitness.is_testing
    fitness.hear("a", Preflighted(serial=orders[0][1].serial, stage=0, free_port=1, is_exact=False))
    news = fitness.proceed(now_s=1.0, usable=("a", "b"), num_needed=1)
    assert [type(event) for event in news.events] == [PreflightDone, NodeQuarantined]
    assert (fitness.is_testing, fitness.untested) == (False, ())
