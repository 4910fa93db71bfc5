"""What `dougong run` decides before anything runs."""

from __future__ import annotations

from dougong.backend.device import FoundAccelerator
from dougong.cli.run_start import rank_peak


def found(name: str) -> FoundAccelerator:
    return FoundAccelerator(index=0, name=name, vendor="NVIDIA")


def test_the_denominator_of_mfu_is_the_dense_peak_of_the_accelerator_that_is_there() -> None:
    peak, source = rank_peak([found("NVIDIA H100 80GB HBM3")])
    assert peak == 989e12, "dense, not the sparse figure on the first page of the data sheet"
    assert "H100" in source


def test_without_an_accelerator_or_with_an_unknown_one_the_peak_is_measured() -> None:
    assert rank_peak([]) == (None, "")
    assert rank_peak([found("Experimental 9000")]) == (None, "")
