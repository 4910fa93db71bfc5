"""What the world sells: accelerators with their published figures, and the link tables of accelerator boards.

SOURCE: each row of `accelerators.csv` names its own. Peaks are dense; scale-up figures are one direction. Where public
figures differ, the first is used, the field stands in `conflicts`, and a cluster file may override the whole kind.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Literal

import msgspec

from dougong.errors import UserError
from dougong.spec.catalog.links import Link, LinkTable, Port, link_table, link_table_names
from dougong.spec.limits import AtLeastOne, NotNegative, Positive
from dougong.spec.values import did_you_mean

__all__ = [
    "Accelerator",
    "Confidence",
    "Link",
    "LinkTable",
    "Port",
    "Precision",
    "accelerator",
    "accelerator_names",
    "accelerators",
    "canonical",
    "link_table",
    "link_table_names",
]

Precision = Literal["fp4", "fp8", "bf16"]
Confidence = Literal["published", "secondary", "announced", "conflicting", "unverified", "low", "user"]


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of accelerator. `None` = not published.

    `*_flop_per_s` are dense peaks, `measured_*` the best matrix multiplication anybody measured (MAMF). `scale_up_*`
    are bytes a second in one direction: to all peers together, and to one peer. `scale_up_domain`: how many
    accelerators one scale-up network joins.
    """

    name: str
    vendor: str = ""
    form_factor: str = ""
    aliases: tuple[str, ...] = ()
    bf16_flop_per_s: Positive | None = None
    fp8_flop_per_s: Positive | None = None
    fp4_flop_per_s: Positive | None = None
    measured_bf16_flop_per_s: Positive | None = None
    measured_fp8_flop_per_s: Positive | None = None
    memory_bytes: Positive | None = None
    memory_bytes_per_s: Positive | None = None
    scale_up_link: str | None = None
    scale_up_bytes_per_s: Positive | None = None
    scale_up_pair_bytes_per_s: Positive | None = None
    scale_up_domain: AtLeastOne | None = None
    tdp_w: NotNegative | None = None
    pcie: str | None = None
    nics: str | None = None
    nic_bytes_per_s: Positive | None = None
    confidence: Confidence = "user"
    conflicts: tuple[str, ...] = ()
    source: str = ""
    note: str = ""

    def peak_flop_per_s(self, precision: Precision) -> float | None:
        """The dense peak; `None` = not published or the precision is not supported."""
        match precision:
            case "bf16":
                return self.bf16_flop_per_s
            case "fp8":
                return self.fp8_flop_per_s
            case "fp4":
                return self.fp4_flop_per_s


CPU = Accelerator(
    name="cpu",
    vendor="generic",
    form_factor="host",
    aliases=("none", "host"),
    source="no published figures: the peak of a host is measured where it runs",
    note="stands for the host's own cores in a node without accelerators",
)


def accelerator(name: str, *, own: Sequence[Accelerator] = ()) -> Accelerator:
    """The accelerator called `name` or by one of its aliases; case and punctuation do not count.

    `own` are kinds that a cluster file describes itself; they go first. Raises UserError with the nearest names.
    """
    key = canonical(name)
    for kind in own:
        if key in {canonical(kind.name), *map(canonical, kind.aliases)}:
            return kind
    found = _by_key().get(key)
    if found is None:
        kinds = (*own, *accelerators())
        aliases = [alias for kind in kinds for alias in kind.aliases]
        raise UserError(
            f"no accelerator is called {name!r}",
            where="accelerator catalog",
            mend=did_you_mean(name, [kind.name for kind in kinds], also=aliases),
        )
    return found


def canonical(name: str) -> str:
    """`A100-80G-SXM4` and `a100 80g sxm4` are the same word."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def accelerator_names() -> tuple[str, ...]:
    """The names in the catalog, as they are written there."""
    return tuple(kind.name for kind in accelerators())


@lru_cache(maxsize=1)
def accelerators() -> tuple[Accelerator, ...]:
    """The whole catalog, `cpu` first."""
    text = (files("dougong.spec.catalog") / "accelerators.csv").read_text(encoding="utf-8")
    return (CPU, *(_from_row(row) for row in csv.DictReader(io.StringIO(text))))


@lru_cache(maxsize=1)
def _by_key() -> dict[str, Accelerator]:
    table: dict[str, Accelerator] = {}
    for kind in accelerators():
        for word in (kind.name, *kind.aliases):
            key = canonical(word)
            assert table.setdefault(key, kind) is kind, f"{word} names two accelerators"
    return table


# Field, its column, and how many SI units one unit of the column is.
_NUMBERS = (
    ("bf16_flop_per_s", "bf16_dense_tflops", 1e12),
    ("fp8_flop_per_s", "fp8_dense_tflops", 1e12),
    ("fp4_flop_per_s", "fp4_dense_tflops", 1e12),
    ("measured_bf16_flop_per_s", "measured_bf16_mamf_tflops", 1e12),
    ("measured_fp8_flop_per_s", "measured_fp8_mamf_tflops", 1e12),
    ("memory_bytes", "hbm_GB", 1e9),
    ("memory_bytes_per_s", "hbm_TBps", 1e12),
    ("scale_up_bytes_per_s", "scale_up_GBps_unidir_aggregate", 1e9),
    ("scale_up_pair_bytes_per_s", "scale_up_GBps_unidir_p2p", 1e9),
    ("tdp_w", "tdp_W", 1.0),
    ("nic_bytes_per_s", "nic_Gbps_per_accel", 1e9 / 8),
)
_FIRST_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")


def _from_row(row: Mapping[str, str]) -> Accelerator:
    numbers = {field: _first_number(row[column], scale) for field, column, scale in _NUMBERS}
    domain = _first_number(row["scale_up_domain"], 1.0)
    texts = {field: row[field] or None for field in ("scale_up_link", "pcie")}
    confidence = msgspec.convert(row["confidence"], Confidence)
    kind = Accelerator(
        name=row["name"],
        vendor=row["vendor"],
        form_factor=row["form_factor"],
        aliases=tuple(alias for alias in row["aliases"].split(";") if alias),
        scale_up_domain=None if domain is None else int(domain),
        nics=row["ref_node_nics"] or None,
        confidence=confidence,
        conflicts=tuple(field for field, column, _ in _NUMBERS if _is_disputed(row[column])),
        source=row["source"],
        note=row["note"],
        scale_up_link=texts["scale_up_link"],
        pcie=texts["pcie"],
    )
    return msgspec.structs.replace(kind, **numbers)


def _first_number(cell: str, scale: float) -> float | None:
    match = _FIRST_NUMBER.search(cell)
    # Rounded to 12 digits: 1.555 TB/s is 1.555e12, not 1554999999999.9998.
    return None if match is None else float(f"{float(match[0]) * scale:.12g}")


def _is_disputed(cell: str) -> bool:
    """More than one number stands in the cell: `96 or 141`, `1000-1100`."""
    return len(_FIRST_NUMBER.findall(cell)) > 1
