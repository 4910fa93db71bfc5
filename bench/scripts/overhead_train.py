"""Steps with `dougong.attach` and steps without, one after the other in one process; what each took goes to a file.

The step without is the loop as a user had it before. Both do the same work: a small network, forward and backward.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

import dougong
from dougong.run.attach import Job


class Batches:
    """The same batch for ever, with sample ids; a position that costs nothing to keep."""

    def __init__(self, batch: torch.Tensor) -> None:
        self.batch = batch
        self.position = 0

    def __iter__(self) -> Iterator[tuple[list[int], torch.Tensor]]:
        while True:
            self.position += 1
            yield [self.position, self.position + 1, self.position + 2, self.position + 3], self.batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def main() -> None:
    options = parse()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(512, options.width), nn.GELU(), nn.Linear(options.width, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    plain, attached = Batches(torch.rand(options.rows, 512)), Batches(torch.rand(options.rows, 512))

    def work(batch: torch.Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    job = dougong.attach(model=model, optimizer=optimizer, data=attached)
    times_ns = {"work": measure(job, plain, work, num_pairs=options.pairs, warm_up=10)}
    times_ns["nothing"] = measure(job, plain, lambda batch: 0.0, num_pairs=options.empty_pairs, warm_up=100)
    options.out.write_text(json.dumps(times_ns))


def measure(
    job: Job, plain: Batches, work: Callable[[torch.Tensor], float], *, num_pairs: int, warm_up: int
) -> dict[str, list[int]]:
    """Nanoseconds of each step from taking its batch to taking the next, attached and plain; who is first changes."""
    steps = job.steps(until=job.num_steps + warm_up + num_pairs + 1)
    batches = iter(plain)

    def attached_step() -> None:
        step = next(steps)  # what the step before has to tidy up happens in here too
        with step as (ids, batch):
            step.record(loss=work(batch), tokens=512, samples=ids)

    def plain_step() -> None:
        _, batch = next(batches)
        work(batch)

    taken: dict[str, list[int]] = {"attached": [], "plain": []}
    order = [("attached", attached_step), ("plain", plain_step)]
    for number in range(warm_up + num_pairs):
        for name, step in order if number % 2 else reversed(order):
            began_ns = time.perf_counter_ns()
            step()
            taken[name].append(time.perf_counter_ns() - began_ns)
    return {name: values[warm_up:] for name, values in taken.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--empty-pairs", type=int, default=5000)
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
