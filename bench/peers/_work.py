"""The training that every script here does: a shard of a GPT that belongs to this rank alone, with Adam's two moments.

A step is 0.5 s in which the host has nothing to do (an accelerator would be busy), or as much of matrix products; an
all-reduce; and an update of the whole state in place. Each value tells which step it is of, so that a saved state can
be told whole from torn: after `step` steps a parameter holds its start + step, its first moment step, its second
2 * step. All are whole numbers, exact in float32.
"""

from __future__ import annotations

import argparse
import mmap
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from _records import Records
from torch import nn

NUM_LAYERS = 12
REDUCED_VALUES = 1 << 20
CUBE = 512  # side of the square products of the busy step


def shapes(width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The 147 parameters of a GPT of 12 layers; 91,961,088 values at width 768."""
    yield "embedding", (width * 83 // 8, width)
    yield "position", (width * 4 // 3, width)
    for layer in range(NUM_LAYERS):
        for name, out, into in (("query", 3, 1), ("mixed", 1, 1), ("wide", 4, 1), ("narrow", 1, 4)):
            yield f"layer_{layer}_{name}_weight", (out * width, into * width)
            yield f"layer_{layer}_{name}_bias", (out * width,)
        for name in ("norm_1_weight", "norm_1_bias", "norm_2_weight", "norm_2_bias"):
            yield f"layer_{layer}_{name}", (width,)
    yield "norm_weight", (width,)


def start_value(name: str) -> float:
    """What the parameter of this name holds before the first step."""
    return float(zlib.crc32(name.encode()) % 1000)


def width_for(state_bytes: int, *, world_size: int) -> int:
    """The width, a multiple of 8, whose state is about that large: 12 B a parameter, each rank its own."""
    wanted = state_bytes / world_size / 12
    return max(8, 8 * round((wanted / 155.9) ** 0.5 / 8))


class Shard(nn.Module):
    """The parameters of one rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for name, shape in shapes(width):
            parameter = nn.Parameter(torch.empty(shape))
            nn.init.constant_(parameter, start_value(name))
            parameter.grad = None
            self.register_parameter(name, parameter)


class Advance(torch.optim.Optimizer):
    """In the place of Adam: the same tensors, all of them changed by each step, with less arithmetic."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def prepare(self) -> None:
        """Make the moments now and not at the first step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._moments(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                first, second = self._moments(parameter)
                parameter.add_(1.0)
                first.add_(1.0)
                second.add_(2.0)

    def _moments(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            for moment in state.values():
                moment.fill_(0.0)  # zeros that nobody wrote are not there yet
        return state["exp_avg"], state["exp_avg_sq"]


class Work:
    """The state of this rank, and the parts of a step."""

    def __init__(self, options: argparse.Namespace, records: Records) -> None:
        torch.set_num_threads(1)
        self.options, self.records = options, records
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(options.device)
        self.model = Shard(width_for(round(options.state_mb * 1e6), world_size=self.world_size)).to(self.device)
        self.optimizer = Advance(self.model.parameters())
        self._reduced = torch.ones(REDUCED_VALUES, device=self.device)
        self._busy_products = 0
        if options.prepare:
            self.optimizer.prepare()
        if options.busy or self.device.type == "cuda":
            self._calibrate()
        if options.floor_rounds:
            self._copy_rounds()

    def compute(self) -> None:
        """The forward and backward pass."""
        if not self._busy_products:
            time.sleep(self.options.compute_s)
        for _ in range(self._busy_products):
            torch.mm(self._left, self._right, out=self._product)

    def reduce(self, *, is_pending: bool = False) -> bool:
        """The gradients' all-reduce; is a save of any rank still pending?"""
        self._reduced.fill_(1.0)
        self._reduced[1] = float(is_pending)
        dist.all_reduce(self._reduced)
        assert self._reduced[0].item() == self.world_size
        return self._reduced[1].item() > 0

    def update(self) -> None:
        self.optimizer.step()
        self._wait()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live tensors by name, without copies."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name}.{key}"] = value
        return found

    def put_back(self, saved: dict[str, torch.Tensor]) -> None:
        """Copy into the live tensors; those that do not exist yet are made."""
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            with torch.no_grad():
                parameter.copy_(saved[name])
            for key in ("exp_avg", "exp_avg_sq"):
                if key in state:
                    state[key].copy_(saved[f"{name}.{key}"])
                else:
                    state[key] = saved[f"{name}.{key}"].clone()

    def _calibrate(self) -> None:
        """How many products fill `compute_s`, with all ranks at it."""
        cube = CUBE if self.device.type == "cpu" else 8 * CUBE
        self._left, self._right, self._product = (torch.rand(cube, cube, device=self.device) for _ in range(3))
        times_s: list[float] = []
        for _ in range(60):
            began_s = time.monotonic()
            torch.mm(self._left, self._right, out=self._product)
            self._wait()
            times_s.append(time.monotonic() - began_s)
        self._busy_products = max(1, round(self.options.compute_s / sorted(times_s)[30]))
        shared = torch.tensor([self._busy_products], device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        self._busy_products = int(shared)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _copy_rounds(self) -> None:
        """The floor of a snapshot that blocks: the state copied into touched shared memory, all ranks at once."""
        tensors = self.tensors()
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        path = Path(f"/dev/shm/{os.environ['BENCH_ID']}-floor-{self.rank}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(fd, 0, num_bytes)
        buffer = mmap.mmap(fd, num_bytes)
        os.close(fd)
        path.unlink()
        copies = torch.frombuffer(buffer, dtype=torch.float32)
        for number in range(self.options.floor_rounds + 1):
            dist.barrier()
            began_ns, offset = time.monotonic_ns(), 0
            for tensor in tensors.values():
                copies[offset : offset + tensor.numel()].copy_(tensor.reshape(-1))
                offset += tensor.numel()
            if number:  # the first one touches
                self.records.add("floor", step=number, begin_ns=began_ns)
        del copies


class Saver(Protocol):
    """How one peer keeps the state."""

    def load(self) -> int:
        """Put the newest saved state into a fresh process; its step, 0 without one."""
        ...

    def save(self, step: int) -> None: ...

    def is_pending(self) -> bool:
        """Is a save not yet complete, as far as this rank knows?"""
        ...

    def before_update(self) -> None:
        """The state is about to change."""
        ...

    def restore(self, step: int) -> None:
        """Put the saved state of `step` back into the live tensors."""
        ...

    def close(self) -> None: ...


class NothingToWaitFor:
    """The parts of a Saver that most have no use for."""

    def is_pending(self) -> bool:
        return False

    def before_update(self) -> None:
        return

    def close(self) -> None:
        return


def train(work: Work, saver: Saver) -> None:
    """The loop of a script that saves by itself: again `quiet_steps` after the last save was complete."""
    options, records = work.options, work.records
    step = saver.load()
    records.add("phase", name="loaded", step=step)
    num_quiet = num_saves = saved_step = 0
    while step < options.steps and (num_saves < options.saves or num_quiet < options.quiet_steps):
        began_ns = time.monotonic_ns()
        work.compute()
        num_quiet = 0 if work.reduce(is_pending=saver.is_pending()) else num_quiet + 1
        saver.before_update()
        work.update()
        step += 1
        records.add("step", step=step, begin_ns=began_ns)
        if num_quiet >= options.quiet_steps and num_saves < options.saves:
            began_ns = time.monotonic_ns()
            saver.save(step)
            records.add("save", step=step, begin_ns=began_ns)
            num_quiet, num_saves, saved_step = 0, num_saves + 1, step
    saver.close()
    for number in range(options.restore_rounds):
        dist.barrier()
        began_ns = time.monotonic_ns()
        saver.restore(saved_step)
        records.add("restore", step=number, begin_ns=began_ns)
    dist.barrier()
    dist.destroy_process_group()


def parse(description: str | None) -> tuple[argparse.Namespace, Records]:
    """The options that every script knows, and where it writes down what happens."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--checkpoints", type=Path, required=True, help="where to save")
    parser.add_argument("--method", default="", help="which of several ways of saving")
    parser.add_argument("--state-mb", type=float, default=2207.0, help="state of all ranks together, in 10^6 B")
    parser.add_argument("--compute-s", type=float, default=0.5)
    parser.add_argument("--device", default="cpu", help="cpu or cuda, where each step is busy")
    parser.add_argument("--busy", action="store_true", help="compute instead of waiting")
    parser.add_argument("--steps", type=int, default=1 << 40, help="no more than that")
    parser.add_argument("--saves", type=int, default=1 << 40, help="saves, after which the script ends")
    parser.add_argument("--quiet-steps", type=int, default=3, help="steps between a complete save and the next one")
    parser.add_argument("--floor-rounds", type=int, default=0, help="measure the copying floor first")
    parser.add_argument("--restore-rounds", type=int, default=0, help="put the last save back that often, at the end")
    parser.add_argument("--prepare", action="store_true", help="make the optimizer's state at the start")
    options = parser.parse_args()
    return options, Records(options.records, rank=int(os.environ["RANK"]))
