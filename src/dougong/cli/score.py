"""`dougong score`: how well a run went."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path), default=Path("runs/latest"))
@click.option("--json", "is_json", is_flag=True, help="Print the scorecard as JSON; null = not measured.")
@click.option(
    "--html",
    "html_path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the report there.",
)
@click.option(
    "--reference",
    "reference_dir",
    type=click.Path(path_type=Path),
    metavar="RUN_DIR",
    help="An undisturbed run of the same seed, to count lost and repeated samples against.",
)
def score(run_dir: Path, is_json: bool, html_path: Path | None, reference_dir: Path | None) -> None:
    """Score the run at RUN_DIR (default: runs/latest) from its events, telemetry and sample ledger."""
    import msgspec

    from dougong.score import evidence

    card, timeline = evidence.score_run(run_dir, reference_dir=reference_dir)
    if html_path is not None:
        evidence.write_report(run_dir, path=html_path, reference_dir=reference_dir)
        click.echo(f"report: {html_path}", err=True)
    if is_json:
        click.echo(msgspec.json.format(msgspec.json.encode(card), indent=2).decode())
    else:
        from dougong.cli.scorecard_table import print_tables

        print_tables(card, timeline)


def print_scorecard(run_dir: Path) -> None:
    """Print the tables of the run at `run_dir` to stdout. Raises as `dougong.score.evidence.score_run`."""
    from dougong.cli.scorecard_table import print_tables
    from dougong.score.evidence import score_run

    print_tables(*score_run(run_dir))


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into `run_dir`; returns where. Raises as `dougong.score.evidence.write_report`."""
    from dougong.score import evidence

    return evidence.write_report(run_dir)
