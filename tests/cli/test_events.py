from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import dougong.event
from dougong.cli.events import events
from dougong.clock import ManualClock
from dougong.errors import StoreDamaged, UserError
from dougong.event.kinds import NodeJoined, NodeLost, Unknown, WorkerLost
from dougong.event.log import EventLog

SOURCE = Path(dougong.event.__file__).parents[2]
PROGRAM = "from dougong.cli.events import events; events()"


def open_log(run_dir: Path, stream: str = "run") -> EventLog:
    clock = ManualClock(1_780_000_000_123_000_000)
    return EventLog.open(run_dir / "events", stream=stream, clock=clock, fsync=False)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    with open_log(tmp_path) as log:
        log.append(NodeJoined(component="hall-a/node-01", role="active", num_accelerators=8))
        log.append(
            WorkerLost(generation=1, rank=3, component="hall-a/node-01/accel-3", cause_class="crash", detail="signal 9")
        )
        log.append(Unknown(kind="Struck", fields_json='{"kind":"Struck","by":"meteor"}'))
        log.append(NodeLost(component="hall-a/node-02", reason="no answer"))
    with open_log(tmp_path, "other") as log:
        log.append(NodeJoined(component="hall-b/node-01", role="spare"))
    return tmp_path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(events, [str(argument) for argument in arguments], catch_exceptions=False)


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )


def test_the_table_has_one_line_for_each_event_and_names_time_place_kind_and_part(run_dir: Path) -> None:
    result = invoke(run_dir)
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["TIME", "STREAM#SEQ", "KIND", "COMPONENT", "WHAT"]
    assert len(lines) == 6
    assert lines[3].split()[2:5] == ["run#2", "WorkerLost", "hall-a/node-01/accel-3"]
    assert lines[3].endswith("rank 3 lost (crash): signal 9")
    assert ".123 " in lines[3]


def test_json_is_the_lines_as_they_are_stored(run_dir: Path) -> None:
    stored = b"".join((run_dir / "events" / name / "00000001.jsonl").read_bytes() for name in ("other", "run"))
    assert invoke(run_dir, "--json").stdout_bytes == stored


def test_events_of_unknown_kinds_are_shown_and_counted_on_stderr(run_dir: Path) -> None:
    result = invoke(run_dir)
    assert "meteor" in result.stdout
    assert result.stderr == "1 events of kinds that this version does not know: Struck (1)\n"


@pytest.mark.parametrize(
    ("options", "places"),
    [
        (["--kind", "WorkerLost"], ["run#2"]),
        (["--kind", "WorkerLost", "--kind", "NodeLost"], ["run#2", "run#4"]),
        (["--component", "hall-a/node-01"], ["run#1", "run#2"]),
        (["--stream", "other"], ["other#1"]),
        (["--limit", "2"], ["run#3", "run#4"]),
        (["--kind", "NodeJoined", "--component", "hall-b"], ["other#1"]),
    ],
)
def test_the_options_choose_events(run_dir: Path, options: list[str], places: list[str]) -> None:
    lines = invoke(run_dir, *options, "--json").stdout.splitlines()
    assert [f"{line['stream']}#{line['seq']}" for line in map(json.loads, lines)] == places


def test_a_misspelt_kind_lists_the_valid_ones(run_dir: Path) -> None:
    with pytest.raises(UserError) as raised:
        invoke(run_dir, "--kind", "workerlost")
    assert "did you mean WorkerLost?" in raised.value.mend
    assert "NodeJoined" in raised.value.mend


def test_a_run_that_is_not_there_or_has_no_events_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such run directory"):
        invoke(tmp_path / "none")
    with pytest.raises(UserError, match="it has no events"):
        invoke(tmp_path)


def test_a_stream_that_is_not_there_lists_those_that_are(run_dir: Path) -> None:
    with pytest.raises(UserError) as raised:
        invoke(run_dir, "--stream", "rnu")
    assert raised.value.mend == "one of other, run"


def test_the_default_is_the_latest_run(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/latest").symlink_to(run_dir)
    assert len(invoke("--json").stdout.splitlines()) == 5


def test_damage_is_raised_with_its_place(run_dir: Path) -> None:
    segment = run_dir / "events" / "run" / "00000001.jsonl"
    segment.write_bytes(segment.read_bytes().replace(b'"seq":2', b'"seq":9'))
    with pytest.raises(StoreDamaged, match=r"00000001\.jsonl:2:"):
        invoke(run_dir)


@pytest.mark.processes
def test_following_prints_what_is_written_later_and_ends_quietly_at_an_interrupt(run_dir: Path) -> None:
    with start(run_dir, "--follow", "--json", "--kind", "NodeLost") as reader:
        assert reader.stdout is not None
        assert reader.stderr is not None
        assert json.loads(reader.stdout.readline())["seq"] == 4
        with open_log(run_dir) as log:
            log.append(NodeLost(component="hall-a/node-03", reason="gone"))
        assert json.loads(reader.stdout.readline())["event"]["component"] == "hall-a/node-03"
        reader.send_signal(signal.SIGINT)
        assert reader.stderr.read() == ""
    assert reader.returncode == 0


@pytest.mark.processes
def test_following_a_run_that_has_not_begun_to_write_waits_for_its_first_event(tmp_path: Path) -> None:
    with start(tmp_path, "--follow", "--json", "--limit", "1") as reader:
        with open_log(tmp_path) as log:
            log.append(NodeLost(component="n", reason="gone"))
        assert reader.stdout is not None
        assert json.loads(reader.stdout.read())["seq"] == 1
    assert reader.returncode == 0


@pytest.mark.processes
def test_a_reader_that_goes_away_is_no_error(run_dir: Path) -> None:
    with open_log(run_dir) as log:
        log.append_many([NodeLost(component="n", reason="x" * 1000)] * 500)
    with start(run_dir, "--kind", "NodeLost") as writer:
        assert writer.stdout is not None
        assert writer.stderr is not None
        writer.stdout.readline()
        writer.stdout.close()
        assert writer.stderr.read() == ""
    assert writer.returncode == 0
