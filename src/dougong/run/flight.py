"""The flight recorder of a rank: which collective it entered last. Torch keeps the record; a thread of the worker
writes it down when its agent asks, so it can be had while the main thread hangs, as long as that one has let go of the
GIL.

Source of the format: torch's FlightRecorder, `_dump_fr_trace_json`; `collective_seq_id` counts the collectives of a
group from 1, `retired` says that one has ended.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from dougong.run.page import Page

_POLL_S = 0.1
_NUM_KEPT = 64


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """The collective that a rank entered last: the `seq`-th of its group."""

    group: str
    seq: int
    name: str
    is_open: bool
    """It has not ended."""


def answer_asks(page: Page, path: Path) -> None:
    """From now on write the record to `path` whenever the page says that it is wanted."""
    threading.Thread(target=_answer, args=(page, path, dump_record), name="dougong-flight", daemon=True).start()


def dump_record() -> str:
    """The last collectives of this process, as JSON; "" if torch has none."""
    try:
        from torch._C import _distributed_c10d as c10d  # pyright: ignore[reportPrivateUsage]
    except ImportError:
        return ""
    dump: Callable[[bool, bool], bytes | str] | None = getattr(c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return ""
    record: dict[str, Any] = msgspec.json.decode(dump(True, False))
    record["entries"] = record.get("entries", [])[-_NUM_KEPT:]
    return msgspec.json.encode(record).decode()


def last_collective(record: str) -> Flight | None:
    """What a record tells; None = nothing was recorded."""
    try:
        entries = msgspec.json.decode(record, type=_Record).entries
    except msgspec.MsgspecError:
        return None
    collectives = [entry for entry in entries if not entry.is_p2p]
    if not collectives:
        return None
    last = max(collectives, key=lambda entry: entry.record_id)
    return Flight(
        group=" ".join(last.process_group),
        seq=last.collective_seq_id,
        name=last.profiling_name,
        is_open=not last.retired,
    )


def who_is_behind(flights: Mapping[int, Flight], *, num_ranks: int) -> tuple[tuple[int, ...], str]:
    """The ranks that have entered fewer collectives than the others, and that in words; () = all are equally far, or
    the records cannot be compared: one is missing, or their last collectives are of different groups."""
    if len(flights) < num_ranks or len({flight.group for flight in flights.values()}) != 1:
        return (), ""
    ahead = max(flights.values(), key=lambda flight: flight.seq)
    least = min(flight.seq for flight in flights.values())
    if least == ahead.seq:
        return (), ""
    behind = tuple(sorted(rank for rank, flight in flights.items() if flight.seq == least))
    who = f"rank {behind[0]} has" if len(behind) == 1 else f"ranks {', '.join(map(str, behind))} have"
    return behind, f"{who} entered {least} collectives, others {ahead.seq} and wait in {ahead.name}"


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    record_id: int
    collective_seq_id: int
    profiling_name: str = ""
    process_group: tuple[str, ...] = ()
    is_p2p: bool = False
    retired: bool = False


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    entries: tuple[_Entry, ...] = ()


def _answer(page: Page, path: Path, dump: Callable[[], str]) -> None:
    answered = page.flights_asked
    while True:
        time.sleep(_POLL_S)
        asked = page.flights_asked
        if asked == answered:
            continue
        answered = asked
        staging = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            staging.write_text(dump())
            staging.replace(path)
        except OSError:
            continue  # no memory for it: the stacks must do
