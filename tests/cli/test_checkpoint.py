from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dougong.cli.checkpoint import Meter, checkpoint
from dougong.cli.main import main
from dougong.clock import ManualClock
from dougong.errors import UserError
from dougong.run import manifest
from dougong.run.layout import RunDirectory
from dougong.run.settings import save_settings
from tests.run.made_checkpoint import CONTENTS, flip, make, write_files
from tests.run.made_settings import settings_at

NUM_BYTES = sum(map(len, CONTENTS.values()))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    save_settings(RunDirectory(root), settings_at(root))
    make(root / "checkpoints", step=50)
    make(root / "checkpoints", step=100)
    make(root / "checkpoints", step=150, generation=2, is_committed=False)
    return root


def call(*arguments: str | Path) -> Result:
    """The group as the command line calls it; the result's exit code is what the command returned."""
    runner = CliRunner()
    result = runner.invoke(checkpoint, [str(item) for item in arguments], standalone_mode=False, catch_exceptions=False)
    if result.return_value is not None:
        result.exit_code = result.return_value
    return result


def test_ls_shows_newest_first_and_names_what_is_not_committed(run_dir: Path) -> None:
    lines = call("ls", run_dir).stdout.splitlines()
    assert lines[0].split() == ["STEP", "GENERATION", "SIZE", "STATE", "AGE", "DIRECTORY"]
    assert [(line.split()[0], line.split()[4]) for line in lines[1:]] == [
        ("150", "uncommitted"),
        ("100", "committed"),
        ("50", "committed"),
    ]


def test_ls_names_the_one_that_a_resume_would_try_first(run_dir: Path) -> None:
    assert "would try first: step-000000100-g001" in call("ls", run_dir).stderr


def test_ls_json_carries_numbers_and_null_for_what_is_not_known(run_dir: Path) -> None:
    document = json.loads(call("ls", run_dir, "--json").stdout)
    torn, newest, _ = document["checkpoints"]
    assert document["url"] == str(run_dir / "checkpoints")
    assert torn["is_committed"] is False and torn["age_s"] is None and torn["num_bytes"] == NUM_BYTES
    assert newest["is_committed"] is True and newest["age_s"] > 0 and newest["num_bytes"] == NUM_BYTES
    assert (newest["step"], newest["generation"], newest["directory"]) == (100, 1, "step-000000100-g001")


def test_ls_tells_a_manifest_that_is_not_the_committed_one(run_dir: Path) -> None:
    flip(run_dir / "checkpoints" / "step-000000100-g001" / "manifest.json", offset_bytes=3)
    result = call("ls", run_dir)
    assert "damaged" in result.stdout.splitlines()[2]
    assert "manifest.json is not the one that was committed" in result.stderr


def test_verify_of_good_ones_succeeds_and_names_the_newest(run_dir: Path) -> None:
    result = call("verify", run_dir)
    assert result.exit_code == 0
    assert [line.split()[1] for line in result.stdout.splitlines()] == ["uncommitted", "good", "good"]
    assert "newest good: step-000000100-g001" in result.stderr


def test_verify_of_a_damaged_one_fails_with_path_reason_and_the_newest_good_one(run_dir: Path) -> None:
    victim = run_dir / "checkpoints" / "step-000000100-g001" / "__0_0.distcp"
    flip(victim, offset_bytes=77)
    result = call("verify", run_dir)
    assert result.exit_code == 1
    assert f"damaged  {victim}: checksum differs" in result.stdout
    assert "newest good: step-000000050-g001" in result.stderr


def test_verify_json_says_the_same_in_fields(run_dir: Path) -> None:
    victim = run_dir / "checkpoints" / "step-000000100-g001" / "rank-0.state"
    victim.unlink()
    result = call("verify", run_dir, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 1
    assert document["num_damaged"] == 1 and document["newest_good"] == "step-000000050-g001"
    damaged = document["checkpoints"][1]
    assert (damaged["verdict"], damaged["path"], damaged["reason"]) == ("damaged", str(victim), "the file is missing")


def test_verify_of_one_step_reads_only_that(run_dir: Path) -> None:
    flip(run_dir / "checkpoints" / "step-000000100-g001" / "__0_0.distcp", offset_bytes=0)
    result = call("verify", run_dir, "--step", "50")
    assert result.exit_code == 0
    assert result.stdout.startswith("step-000000050-g001  good")


def test_an_uncommitted_one_is_no_damage(tmp_path: Path) -> None:
    write_files(tmp_path, step=5)
    result = call("verify", tmp_path)
    assert result.exit_code == 0
    assert "no good checkpoint" in result.stderr


def test_a_step_that_is_not_there_is_a_mistake_that_lists_the_others(run_dir: Path) -> None:
    with pytest.raises(UserError) as caught:
        call("verify", run_dir, "--step", "51")
    assert "one of 50, 100, 150" in caught.value.mend


def test_a_directory_of_checkpoints_and_a_url_are_places_too(run_dir: Path) -> None:
    by_directory = call("verify", run_dir / "checkpoints")
    by_url = call("verify", f"file://{run_dir / 'checkpoints'}")
    assert by_directory.stdout == by_url.stdout
    assert by_url.exit_code == 0


def test_a_run_directory_that_was_moved_has_its_checkpoints_beside_it(run_dir: Path, tmp_path: Path) -> None:
    shutil.move(run_dir, tmp_path / "elsewhere")
    assert call("verify", tmp_path / "elsewhere").exit_code == 0


def test_without_an_argument_the_latest_run_is_meant(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run_dir.parent / "runs").mkdir()
    (run_dir.parent / "runs" / "latest").symlink_to(run_dir)
    monkeypatch.chdir(run_dir.parent)
    assert "step-000000100-g001" in call("ls").stdout


@pytest.mark.parametrize("verb", ["ls", "verify"])
def test_a_place_that_is_no_run_is_a_mistake_of_three_parts(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (tmp_path, tmp_path / "absent"):
        with pytest.raises(SystemExit) as left:
            main(["checkpoint", verb, str(place)])
        said = capsys.readouterr().err
        assert left.value.code == 2
        assert "where:" in said and "mend:" in said


def test_a_run_without_checkpoints_says_so_and_is_well(tmp_path: Path) -> None:
    save_settings(RunDirectory(tmp_path), settings_at(tmp_path))
    assert "no good checkpoint" in call("ls", tmp_path).stderr
    verified = call("verify", tmp_path)
    assert verified.exit_code == 0 and "no checkpoint" in verified.stderr


def test_a_rejected_one_is_listed_as_damaged(run_dir: Path) -> None:
    manifest.reject(str(run_dir / "checkpoints"), "step-000000100-g001", reason="checksum differs")
    assert "damaged" in call("ls", run_dir).stdout.splitlines()[2]


def test_long_reading_tells_rate_and_time_left() -> None:
    said: list[str] = []
    clock = ManualClock()
    meter = Meter(100_000_000, clock=clock, is_tty=False, say=said.append)
    clock.advance_s(5)
    meter.advance(10_000_000)
    assert said == []
    clock.advance_s(5)
    meter.advance(10_000_000)
    assert said == ["reading: 20 MB of 100 MB, 2 MB/s, 40 s left\n"]


def test_on_a_terminal_the_line_is_written_over_and_taken_back() -> None:
    said: list[str] = []
    clock = ManualClock()
    meter = Meter(100, clock=clock, is_tty=True, say=said.append)
    clock.advance_s(2)
    meter.advance(50)
    meter.clear()
    assert said[0].startswith("\rreading: 50 B of 100 B")
    assert said[1].strip() == ""
