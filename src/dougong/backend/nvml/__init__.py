"""NVIDIA accelerators, through nvidia-ml-py (the extra `nvidia`)."""

from __future__ import annotations

import importlib
from typing import Any

from dougong.backend.device import FoundAccelerator, Probed

MAX_LINKS = 18


class NvmlProbe:
    """Asks the NVIDIA driver. `library` is the module `pynvml`, or one with the same functions."""

    def __init__(self, library: Any | None = None) -> None:
        self._library = library

    def accelerators(self) -> Probed:
        """The accelerators the driver shows, in its order; none, with the reason, where there is no driver."""
        nvml = self._library or _import_nvml()
        if nvml is None:
            return Probed(accelerators=(), reason="nvidia-ml-py is not installed (pip install 'dougong[nvidia]')")
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            return Probed(accelerators=(), reason=f"the NVIDIA driver does not answer: {error}")
        try:
            found = tuple(_describe(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        except nvml.NVMLError as error:
            return Probed(accelerators=(), reason=f"the NVIDIA driver gave up: {error}")
        finally:
            nvml.nvmlShutdown()
        return Probed(accelerators=found, reason="" if found else "the NVIDIA driver shows no accelerator")


def _import_nvml() -> Any | None:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def _describe(nvml: Any, index: int) -> FoundAccelerator:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    pcie = _ask(nvml, nvml.nvmlDeviceGetPciInfo, handle)
    limit_mw = _ask(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return FoundAccelerator(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        vendor="NVIDIA",
        uuid=_text(_ask(nvml, nvml.nvmlDeviceGetUUID, handle) or ""),
        pcie_address=_address(_text(pcie.busId)) if pcie is not None else "",
        memory_bytes=int(memory.total) if memory is not None else None,
        power_limit_w=limit_mw / 1000 if limit_mw is not None else None,
        num_scale_up_links=_num_links(nvml, handle),
    )


def _num_links(nvml: Any, handle: Any) -> int | None:
    states = [_ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(MAX_LINKS)]
    told = [state for state in states if state is not None]
    return sum(map(bool, told)) if told else None


def _ask(nvml: Any, question: Any, *arguments: Any) -> Any | None:
    """The answer, or `None` where this device does not support the question."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    # Older versions of the library answer in bytes.
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _address(bus_id: str) -> str:
    """`00000000:19:00.0` as the kernel writes it: `0000:19:00.0`."""
    domain, colon, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}{colon}{rest}"
