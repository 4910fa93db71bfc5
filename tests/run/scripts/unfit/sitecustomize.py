"""Makes the pre-flight tests of some nodes go wrong, as told by UNFIT: `NODE:FAULT` with a blank between two.

Put its folder first in PYTHONPATH. Faults: `wrong` (one entry of every product), `slow`, `silent` (no answer), `deaf`
(leaves before any all-reduce).
"""

from __future__ import annotations

import os
import time


def _spoil() -> None:
    node = os.environ.get("DOUGONG_NODE", "").rpartition(":")[2].rpartition("/")[2]
    faults = dict(fault.split(":") for fault in os.environ.get("UNFIT", "").split())
    if node not in faults:
        return
    from dougong.run import preflight_worker

    multiply = preflight_worker.multiply

    def wrong(left, right):
        product = multiply(left, right)
        product[3, 5] += 1.0
        return product

    def slow(left, right):
        for _ in range(4):
            multiply(left, right)
        return multiply(left, right)

    def silent(left, right):
        time.sleep(3600)

    def deaf(place, device):
        raise RuntimeError("this node does not take part")

    fault = faults[node]
    if fault == "deaf":
        preflight_worker.pair = deaf
    else:
        preflight_worker.multiply = {"wrong": wrong, "slow": slow, "silent": silent}[fault]


if os.environ.get("UNFIT"):
    os.register_at_fork(after_in_child=_spoil)
