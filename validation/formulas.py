"""Every formula of `dougong.cost` against a published number: `python validation/formulas.py` prints the errors."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dougong.cost.flops import TransformerShape, hardware_flop_per_token, model_flop_per_token
from dougong.cost.interval import daly_interval_s, young_interval_s
from dougong.cost.reliability import (
    chi_square_quantile,
    failures_per_1000_node_days,
    job_mttf_s,
    mtbf_interval_s,
)
from dougong.units import DAY_S, HOUR_S, MINUTE_S

TABLE = Path(__file__).with_name("formulas.csv")


class Checked(NamedTuple):
    """A row of the table with what we compute. `is_claimed` false: shown to mark where the formula does not hold."""

    id: str
    formula: str
    published: float
    computed: float
    unit: str
    is_claimed: bool
    source: str

    @property
    def error_ratio(self) -> float:
        return self.computed / self.published - 1


def checked_rows(path: Path = TABLE) -> list[Checked]:
    """All rows of the table, computed."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Checked(
                id=row["id"],
                formula=row["formula"],
                published=float(row["published"]),
                computed=FORMULAS[row["formula"]](**_inputs(row["inputs"])),
                unit=row["unit"],
                is_claimed=row["claim"] == "yes",
                source=row["source"],
            )
            for row in csv.DictReader(file)
        ]


def _inputs(text: str) -> dict[str, Any]:
    inputs = json.loads(text)
    if "shape" in inputs:
        inputs["shape"] = msgspec.convert(inputs["shape"], TransformerShape)
    return inputs


def _mfu(*, shape: TransformerShape, tokens_per_s: float, peak_flop_per_s: float) -> float:
    return tokens_per_s * model_flop_per_token(shape, causal_factor=1.0) / peak_flop_per_s


def _hfu_attention(*, shape: TransformerShape, tokens_per_s: float, peak_flop_per_s: float) -> float:
    flop = hardware_flop_per_token(shape, causal_factor=1.0, recomputation="attention")
    return tokens_per_s * flop / peak_flop_per_s


def _training_days(*, shape: TransformerShape, tokens: float, achieved_flop_per_s: float) -> float:
    flop = hardware_flop_per_token(shape, causal_factor=1.0, recomputation="full")
    return tokens * flop / achieved_flop_per_s / DAY_S


FORMULAS: dict[str, Callable[..., float]] = {
    "failures_per_1000_node_days": lambda *, num_failures, **inputs: failures_per_1000_node_days(
        num_failures, **inputs
    ),
    "job_mttf_h": lambda **inputs: job_mttf_s(**inputs) / HOUR_S,
    "chi_square_quantile": lambda *, probability, degrees: chi_square_quantile(probability, degrees=degrees),
    "mtbf_lower_s": lambda *, operating_s, num_failures: mtbf_interval_s(operating_s, num_failures=num_failures)[0],
    "young_interval_min": lambda **inputs: young_interval_s(**inputs) / MINUTE_S,
    "daly_interval_min": lambda **inputs: daly_interval_s(**inputs) / MINUTE_S,
    "mfu": _mfu,
    "hfu_attention": _hfu_attention,
    "training_days_full_recomputation": _training_days,
}


def main() -> None:
    print(f"{'id':<16} {'published':>10} {'computed':>10} {'error':>8}  source")
    for row in checked_rows():
        mark = "" if row.is_claimed else "not claimed: "
        print(f"{row.id:<16} {row.published:>10.4g} {row.computed:>10.4g} {row.error_ratio:>+8.2%}  {mark}{row.source}")


if __name__ == "__main__":
    main()
