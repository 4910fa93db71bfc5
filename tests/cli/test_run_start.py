"""What `dougong run` decides before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from dougong.backend.device import FoundAccelerator
from dougong.cli.run_options import RunOptions, Shape
from dougong.cli.run_start import rank_peak, settings_for, with_setting
from dougong.errors import UserError
from dougong.run.settings import RunSettings, run_directory


def settings() -> RunSettings:
    run = run_directory(Path("runs/one"))
    wanted = Shape(num_nodes=1, procs_per_node=1)
    return settings_for(RunOptions(command=("train.py",)), wanted, ("train.py",), run, is_chaos=False)


def test_every_limit_can_be_set_by_name() -> None:
    changed = with_setting(with_setting(settings(), "hang.startup_s=7200"), "policy.max_fruitless=9")
    assert (changed.hang.startup_s, changed.policy.max_fruitless) == (7200.0, 9)


@pytest.mark.parametrize("text", ["hang.statup_s=1", "startup_s=1", "hang.startup_s", "hang.startup_s=soon"])
def test_a_wrong_setting_is_told_with_what_would_be_right(text: str) -> None:
    with pytest.raises(UserError) as caught:
        with_setting(settings(), text)
    assert "--set" in str(caught.value)


def found(name: str) -> FoundAccelerator:
    return FoundAccelerator(index=0, name=name, vendor="NVIDIA")


def test_the_denominator_of_mfu_is_the_dense_peak_of_the_accelerator_that_is_there() -> None:
    peak, source = rank_peak([found("NVIDIA H100 80GB HBM3")])
    assert peak == 989e12, "dense, not the sparse figure on the first page of the data sheet"
    assert "H100" in source


def test_without_an_accelerator_or_with_an_unknown_one_the_peak_is_measured() -> None:
    assert rank_peak([]) == (None, "")
    assert rank_peak([found("Experimental 9000")]) == (None, "")
