"""The formulas against the published numbers of `validation/formulas.csv`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

_SCRIPT = Path(__file__).parents[2] / "validation" / "formulas.py"
_spec = importlib.util.spec_from_file_location("validation_formulas", _SCRIPT)
assert _spec is not None
assert _spec.loader is not None
formulas = importlib.util.module_from_spec(_spec)
sys.modules["validation_formulas"] = formulas
_spec.loader.exec_module(formulas)

ROWS = formulas.checked_rows()


@pytest.mark.parametrize("row", [row for row in ROWS if row.is_claimed], ids=lambda row: row.id)
def test_a_claimed_formula_is_within_three_per_cent_of_the_published_number(row: Any) -> None:
    assert abs(row.error_ratio) < 0.03


def test_what_node_failures_do_not_explain_is_not_claimed() -> None:
    (row,) = [row for row in ROWS if row.id == "rsc1-1024"]
    assert not row.is_claimed
    assert row.error_ratio > 1
