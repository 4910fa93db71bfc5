"""The same training saved and restored by `dougong.attach`, under `dougong run`."""

from __future__ import annotations

import time

STARTED_NS = time.monotonic_ns()

import torch.distributed as dist  # noqa: E402
from _work import Work, parse  # noqa: E402

import dougong  # noqa: E402


def main() -> None:
    options, records = parse(__doc__)
    records.add("phase", name="started", ns=STARTED_NS)
    records.add("phase", name="imported")
    dougong.init_process_group()
    records.add("phase", name="group")
    work = Work(options, records)
    records.add("phase", name="built")
    job = dougong.attach(model=work.model, optimizer=work.optimizer)
    is_loaded = False
    for step in job.steps(until=options.steps):
        if not is_loaded:
            is_loaded = True
            records.add("phase", name="loaded", step=job.num_steps)
        with step:
            began_ns = time.monotonic_ns()
            work.compute()
            work.reduce()
            work.update()
            records.add("step", step=step.number, begin_ns=began_ns)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
