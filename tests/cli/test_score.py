from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dougong import telemetry
from dougong.cli.score import score
from dougong.clock import ManualClock
from dougong.errors import UserError
from dougong.event.log import EventLog
from dougong.score.evidence import score_run, write_report
from tests.score.story import one_interruption


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    with EventLog.open(tmp_path / "events", stream="controller", clock=ManualClock()) as log:
        for recorded in one_interruption().records:
            log.append(recorded.event, time_ns=recorded.time_ns)
    return tmp_path


def test_json_carries_the_contract_with_null_for_what_was_not_measured(run_dir: Path) -> None:
    result = CliRunner().invoke(score, [str(run_dir), "--json"], catch_exceptions=False)
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert document["interruptions"] == 1
    assert document["mttd_s"] == 1.0
    assert document["mttr_s"] == 9.0
    for name in ("mfu", "samples_lost", "samples_repeated", "samples_skipped"):
        assert document[name] is None
    for name in ("ettr", "mtbf_s", "checkpoint_stall_ratio", "tokens_per_s"):
        assert isinstance(document[name], float)


@pytest.mark.parametrize("columns", ["60", "80", "160"])
def test_the_table_says_what_was_not_measured(run_dir: Path, columns: str) -> None:
    result = CliRunner().invoke(score, [str(run_dir)], env={"COLUMNS": columns}, catch_exceptions=False)
    assert "not measured" in result.stdout
    assert "48.4 %" in result.stdout
    assert "\x1b[" not in result.stdout


def test_the_table_is_the_golden_one(run_dir: Path) -> None:
    result = CliRunner().invoke(score, [str(run_dir)], env={"COLUMNS": "120"}, catch_exceptions=False)
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines == (Path(__file__).parent / "golden" / "score.txt").read_text().splitlines()


def test_html_is_written_where_it_is_asked_for_and_the_table_stays_on_stdout(run_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    result = CliRunner().invoke(score, [str(run_dir), "--json", "--html", str(path)], catch_exceptions=False)
    assert path.read_text().startswith("<!doctype html>")
    json.loads(result.stdout)
    assert str(path) in result.stderr


def test_the_report_of_a_run_lies_beside_its_events(run_dir: Path) -> None:
    assert write_report(run_dir) == run_dir / "report.html"
    assert (run_dir / "report.html").is_file()


def test_a_run_that_is_not_there_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run directory"):
        score_run(tmp_path / "none")
    with pytest.raises(UserError, match="no events"):
        score_run(tmp_path)


def test_a_report_that_cannot_be_written_is_the_users_mistake(run_dir: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        write_report(run_dir, path=run_dir / "missing" / "page.html")


def test_step_times_and_loss_come_from_telemetry_where_it_has_them(run_dir: Path) -> None:
    writer = telemetry.SampleWriter.open(run_dir / "telemetry", ManualClock())
    writer.append("step_s/rank-0", [1, 2, 3], [1, 2, 2], [1.0, 9.0, 2.0])
    writer.append("step_s/rank-1", [1, 2], [1, 2], [1.5, 0.5])
    writer.append("loss/rank-0", [1, 2, 3], [1, 2, 2], [5.0, 7.0, 4.0])
    writer.close()
    card, timeline = score_run(run_dir)
    assert card.step_times is not None
    assert (card.step_times.num, card.step_times.p50_s, card.step_times.max_s) == (2, 1.5, 2.0)
    assert "telemetry" in card.step_times.source
    assert timeline.losses == ((1, 5.0), (2, 4.0))


def test_samples_are_counted_against_a_reference_run(run_dir: Path, tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    for root, ids in ((reference, [1, 2]), (run_dir, [1, 1])):
        (root / "ledger").mkdir(parents=True)
        (root / "ledger" / "rank-0.jsonl").write_text(json.dumps({"step": 1, "ids": ids}) + "\n")
    result = CliRunner().invoke(score, [str(run_dir), "--json", "--reference", str(reference)], catch_exceptions=False)
    document = json.loads(result.stdout)
    assert (document["samples_lost"], document["samples_repeated"], document["samples_skipped"]) == (1, 1, 0)
