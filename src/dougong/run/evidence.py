"""What is gathered about ranks that make no progress before they are ended: stacks, threads as the kernel sees them,
and the last collectives. Kept as files for a person, and told in one line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from dougong.backend.local import process
from dougong.run.flight import Flight, last_collective
from dougong.run.layout import write_atomically
from dougong.run.page import Page
from dougong.run.stacks import take_stack
from dougong.run.wire import RankEvidence

_FLIGHT_S = 0.6
_POLL_S = 0.02


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """The evidence of one finding."""

    reason: str
    verdict: str
    ranks: tuple[RankEvidence, ...]


async def take_evidence(rank: int, *, pid: int, page: Page, flight_path: Path) -> RankEvidence:
    """All that can be had of one rank from outside. A stopped process or a held GIL gives no record of collectives."""
    flight_path.unlink(missing_ok=True)
    page.ask_flight()
    threads = threads_in_words(pid)
    stack, flight = await asyncio.gather(take_stack(pid), _wait_for(flight_path))
    return RankEvidence(rank=rank, stack=stack, threads=threads, flight=flight)


def threads_in_words(pid: int) -> str:
    """One line per thread: its state, what it waits in, and the CPU time it has used."""
    lines = [f"{'thread':>8} {'state':5} {'cpu_s':>9}  {'waits in':24} name"]
    lines += [
        f"{thread.thread:>8} {thread.state:5} {thread.cpu_s:>9.2f}  {thread.waits_in or '-':24} {thread.name}"
        for thread in process.threads(pid)
    ]
    return "\n".join(lines)


def flights_of(ranks: tuple[RankEvidence, ...]) -> dict[int, Flight]:
    """The last collective of each rank that told it."""
    told = ((one.rank, last_collective(one.flight)) for one in ranks)
    return {rank: flight for rank, flight in told if flight is not None}


def write_bundle(directory: Path, bundle: Bundle) -> None:
    """`stacks.txt`, `threads.txt` and `flight-rank-R.json`. Raises OSError."""
    head = [bundle.reason, bundle.verdict, ""]
    stacks, threads = list(head), list(head)
    for one in bundle.ranks:
        stacks += [f"=== rank {one.rank}", one.stack]
        threads += [f"=== rank {one.rank}", one.threads, ""]
    write_atomically(directory / "stacks.txt", "\n".join(stacks).encode())
    write_atomically(directory / "threads.txt", "\n".join(threads).encode())
    for one in bundle.ranks:
        if one.flight:
            write_atomically(directory / f"flight-rank-{one.rank}.json", one.flight.encode())


async def _wait_for(path: Path) -> str:
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + _FLIGHT_S
    while loop.time() < ends_s:
        try:
            return path.read_text()
        except OSError:
            await asyncio.sleep(_POLL_S)
    return ""
