"""What the program asks of accelerators of any make: which ones there are."""

from __future__ import annotations

from typing import Protocol

import msgspec


class FoundAccelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator as its driver names it. `None` = the driver does not tell.

    `num_scale_up_links` counts the links to other accelerators that are up now.
    """

    index: int
    name: str
    vendor: str
    uuid: str = ""
    pcie_address: str = ""
    memory_bytes: int | None = None
    power_limit_w: float | None = None
    num_scale_up_links: int | None = None


class Probed(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe found. `reason` tells in words why nothing was found."""

    accelerators: tuple[FoundAccelerator, ...]
    reason: str = ""


class DeviceProbe(Protocol):
    """A driver library of one vendor. A missing driver is an answer, not an error."""

    def accelerators(self) -> Probed:
        """The accelerators of this machine, by index."""
        ...
