"""`dougong show`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dougong.cli.show import show
from dougong.errors import Problems

LARGE = Path(__file__).parents[2] / "examples" / "clusters" / "h100-16384.yaml"


def test_the_summary_names_the_totals() -> None:
    result = CliRunner().invoke(show, [str(LARGE)], catch_exceptions=False)
    assert result.exit_code == 0
    for word in ("2048 nodes", "16384 accelerators", "16.2 EFLOP/s", "hgx-h100", "tectonic", "24 MW"):
        assert word in " ".join(result.stdout.split())


def test_the_tree_joins_equal_components_into_ranges() -> None:
    result = CliRunner().invoke(show, [str(LARGE), "--tree"], catch_exceptions=False)
    assert result.stdout == (
        "h100-16384: 2048 nodes, 16384 accelerators\n"
        "  hall-[1-4]\n"
        "    rack-[001-256]\n"
        "      node-[1-2]  (hgx-h100)\n"
        "        accel-[0-7]\n"
        "        disk-[0-9]\n"
        "        nic-[0-10]\n"
        "        psu-[0-5]\n"
    )


def test_json_has_the_whole_description_and_totals() -> None:
    whole = json.loads(CliRunner().invoke(show, [str(LARGE), "--json"], catch_exceptions=False).stdout)
    assert whole["totals"]["num_accelerators"] == 16384
    assert whole["cluster"]["node_types"][0]["memory_bytes"] == 2e12


def test_warnings_are_talk_and_not_data(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("name: c\nnodes: {n: t}\nnode_types: {t: {}, u: {}}\n", encoding="utf-8")
    result = CliRunner().invoke(show, [str(path), "--json"], catch_exceptions=False)
    assert json.loads(result.stdout)["totals"]["num_nodes"] == 1
    assert "c.yaml:3 node_types.u" in result.stderr


def test_markup_in_a_name_is_shown_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("name: c\nnodes: {n: '[red]'}\nnode_types: [{name: t}]\n", encoding="utf-8")
    with pytest.raises(Problems):
        CliRunner().invoke(show, [str(path)], catch_exceptions=False)
