"""NVIDIA accelerators, asked of a stand-in for the driver's library."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from dougong.backend.nvml import NvmlProbe


class NvmlError(Exception):
    """What the library raises for everything."""


class FakeNvml:
    """The functions of `pynvml` that the probe calls, for cards of the given names."""

    NVMLError = NvmlError

    def __init__(self, names: Sequence[str | bytes], *, fails_at: str = "", num_links: int = 0) -> None:
        self.names = names
        self.fails_at = fails_at
        self.num_links = num_links
        self.is_open = False

    def _may_fail(self, function: str) -> None:
        if function == self.fails_at:
            raise NvmlError(f"{function} is not supported")

    def nvmlInit(self) -> None:
        self._may_fail("init")
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        self._may_fail("count")
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return self.names[handle]

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        self._may_fail("memory")
        return SimpleNamespace(total=85_899_345_920)

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:{0x19 + handle:02X}:00.0".encode())

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        self._may_fail("power")
        return 700_000

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= 4:
            raise NvmlError("no such link")
        return int(link < self.num_links)


def test_a_card_is_described_in_base_units() -> None:
    nvml = FakeNvml(["NVIDIA H100 80GB HBM3", b"NVIDIA H100 80GB HBM3"], num_links=3)
    probed = NvmlProbe(nvml).accelerators()
    first, second = probed.accelerators
    assert (first.index, first.name, first.vendor, first.uuid) == (0, "NVIDIA H100 80GB HBM3", "NVIDIA", "GPU-0")
    assert (first.pcie_address, second.pcie_address) == ("0000:19:00.0", "0000:1a:00.0")
    assert (first.memory_bytes, first.power_limit_w, first.num_scale_up_links) == (85_899_345_920, 700.0, 3)
    assert second.name == first.name
    assert not nvml.is_open


def test_what_a_card_does_not_tell_is_none() -> None:
    assert NvmlProbe(FakeNvml(["x"], fails_at="power")).accelerators().accelerators[0].power_limit_w is None
    assert NvmlProbe(FakeNvml(["x"], fails_at="memory")).accelerators().accelerators[0].memory_bytes is None


def test_a_driver_that_does_not_answer_is_no_accelerator_and_a_reason() -> None:
    for fails_at in ("init", "count"):
        nvml = FakeNvml(["x"], fails_at=fails_at)
        probed = NvmlProbe(nvml).accelerators()
        assert probed.accelerators == ()
        assert "driver" in probed.reason
        assert not nvml.is_open


def test_no_card_is_a_reason() -> None:
    assert "no accelerator" in NvmlProbe(FakeNvml([])).accelerators().reason
