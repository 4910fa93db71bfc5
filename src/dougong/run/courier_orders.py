"""What an agent and its courier say to each other: JSON lines over the courier's stdin and stdout."""

from __future__ import annotations

import msgspec

from dougong.run.wire import CopyOrder, CopyStatus, CourierAddress


class Bring(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Have a state among the checkpoints of this node's own rank, from this node's copies or from another's memory."""

    request: int
    rank: int
    generation: int
    step: int
    origin: CourierAddress


class Brought(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It is there, or (`reason`) why not."""

    request: int
    reason: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Where the courier answers, and the copies that it keeps. `problem`: why one could not be made."""

    port: int
    copies: tuple[CopyStatus, ...]
    problem: str = ""


CourierOrder = CopyOrder | Bring
CourierMessage = Brought | Report
