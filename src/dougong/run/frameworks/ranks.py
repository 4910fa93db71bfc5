"""What frameworks cannot do: go on with another number of ranks."""

from __future__ import annotations

from dougong.errors import UserError


def check_world_size(saved: int, now: int, *, where: str) -> None:
    """Raises UserError if the state is of another number of ranks, since each rank keeps its own place in the data."""
    if saved != now:
        raise UserError(
            f"the state was saved by {saved} ranks, now there are {now}",
            where=where,
            mend="run on as many ranks as before, or use dougong.attach, which can share the data out anew",
        )
