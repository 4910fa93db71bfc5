"""The same training saved and restored by `dougong.attach`, under `dougong run`."""

from __future__ import annotations

import time

STARTED_NS = time.monotonic_ns()

import torch.distributed as dist  # noqa: E402
from _records import Records  # noqa: E402
from _work import Work, parse  # noqa: E402

import dougong  # noqa: E402
from dougong.run.place import worker_place  # noqa: E402
from dougong.run.put_in import tree_in_place  # noqa: E402
from dougong.run.snapshot import SnapshotFiles  # noqa: E402
from dougong.run.state import put_back  # noqa: E402


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
    restore_again(work, records, rounds=options.restore_rounds)
    dist.destroy_process_group()


def restore_again(work: Work, records: Records, *, rounds: int) -> None:
    """Put the newest memory checkpoint back into the live tensors, as a rank does that stays in its process."""
    place = worker_place()
    if place is None or not rounds:
        return
    files = SnapshotFiles(place.node.snapshot(place.rank))
    parts = {"model": work.model, "optimizer": work.optimizer}
    for number in range(rounds + 1):
        dist.barrier()
        began_ns = time.monotonic_ns()
        buffer, comparison = files.compare(files.slots()[0])
        put_back(tree_in_place(buffer, parts, is_adopted=False, before_read=comparison.advance), parts)
        assert comparison.is_equal()
        if number:  # the first one maps the buffer, which a rank that stays has done long ago
            records.add("restore", step=number, begin_ns=began_ns)


if __name__ == "__main__":
    main()
