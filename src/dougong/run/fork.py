"""What an agent and its zygote say to each other: JSON lines over the zygote's stdin and stdout."""

from __future__ import annotations

from typing import Literal

import msgspec


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Start one worker. `variables` are set over the zygote's own environment."""

    request: int
    variables: dict[str, str]
    command: tuple[str, ...]
    working_directory: str
    log_path: str
    entry: Literal["script", "preflight"] = "script"


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    request: int
    pid: int


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker ended: its exit code, or the signal that ended it."""

    pid: int
    exit_code: int | None
    signal: int | None


ZygoteMessage = Forked | Exited
