# pyright: reportPrivateImportUsage=false
# torch exports its stores unmarked.
"""What only a GPU can show, in at most six minutes on a machine with one: `bench/results/gpu.json`.

    python bench/gpu_session.py [--out FILE] [--only copies nccl …]
    python bench/gpu_session.py --rehearse       the same on the CPU, small, to see that the script is right

    copies   state copied into pinned shared memory beside the next step's work: held up, lost, rate, whole or torn
    nccl     a communicator of one rank aborted and made anew
    standby  how soon a new process computes: started cold, with torch imported, with a live CUDA context
    mfu      a GPT's training step against the peak measured here, with power and clocks from NVML beside it
    run      `dougong run` itself: a durable save, and a kill -9 (needs Dougong's own packages)

Needs torch alone, but for the last. Each part is a process of its own with its own limit, so that none that hangs takes
the others along, and the file is written after each. Without a GPU the file says "not run on a GPU".
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 350.0
LIMITS_S = {"copies": 70.0, "nccl": 40.0, "standby": 80.0, "mfu": 70.0, "run": 85.0}
NOT_RUN = "not run on a GPU"
Figures = dict[str, Any]


def main() -> int:
    options = _parse()
    if options.part:
        print(json.dumps(PARTS[options.part](is_rehearsal=options.rehearse)), flush=True)
        return 0
    result: Figures = {"benchmark": "gpu_session", "is_rehearsal": options.rehearse, "machine": _machine()}
    if not options.rehearse and result["machine"]["gpu"] is None:
        _write(options.out, {**result, "status": NOT_RUN})
        print(NOT_RUN)
        return 0
    began_s = time.monotonic()
    for part in options.only:
        left_s = BUDGET_S - (time.monotonic() - began_s)
        result[part] = _apart(part, is_rehearsal=options.rehearse, limit_s=min(LIMITS_S[part], left_s))
        print(f"{time.monotonic() - began_s:5.0f} s  {part}: {json.dumps(result[part])}", flush=True)
        _write(options.out, {**result, "status": "rehearsed on the CPU" if options.rehearse else "run on a GPU"})
    return 1 if any("failed" in result[part] for part in options.only) else 0


def _apart(part: str, *, is_rehearsal: bool, limit_s: float) -> Figures:
    """The figures of a part, measured in a process of its own; `failed` with its last words if it has none."""
    if limit_s < 10.0:
        return {"failed": "no time left for it"}
    command = [sys.executable, str(Path(__file__).resolve()), "--part", part]
    command += ["--rehearse"] if is_rehearsal else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr
        return {"failed": f"not done within {limit_s:.0f} s", "said": (said or "")[-1000:]}
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        return {"failed": f"ended with {done.returncode}", "said": done.stderr[-2000:]}
    return json.loads(lines[-1])


# --- copies --------------------------------------------------------------------------------------------------------


def measure_copies(*, is_rehearsal: bool) -> Figures:
    """Steps with and without a copy beside them; every value tells its step, so that a torn copy is seen."""
    import torch

    num_tensors, num_values = (441, 1 << 12) if is_rehearsal else (441, (4 << 30) // 4 // 441)
    device = torch.device("cpu" if is_rehearsal else "cuda")
    state = [torch.zeros(num_values, device=device) for _ in range(num_tensors)]
    num_bytes = sum(tensor.nbytes for tensor in state)
    buffer = mmap.mmap(-1, num_bytes)
    host = torch.frombuffer(buffer, dtype=torch.float32)
    host.fill_(-1.0)
    pinned = _pin(host) if not is_rehearsal else False
    copier = _Copier(state, host, device=device)
    work = _Products(device, seconds=0.02 if is_rehearsal else 0.25)
    floor_s = [_timed(copier.copy_and_wait) for _ in range(5)]
    pageable_s = [_timed(lambda: [tensor.cpu() for tensor in state]) for _ in range(2)]
    plain_s, beside_s, held_s = [], [], []
    num_torn = 0
    for number in range(24):
        is_copying = number >= 4 and number % 2 == 1  # plain and copying steps alternate
        expected = state[0][0].item()
        began_s = time.monotonic()
        held = _timed(copier.begin) if is_copying else 0.0
        work()
        held += _timed(copier.fence)  # nothing may change before it is over
        for tensor in state:
            tensor.add_(1.0)
        _synchronize(device)
        took_s = time.monotonic() - began_s
        if is_copying:
            copier.wait()
            low, high = torch.aminmax(host)
            num_torn += not (low.item() == high.item() == expected)
            beside_s.append(took_s)
            held_s.append(held)
        elif number >= 4:
            plain_s.append(took_s)
    return {
        "state_bytes": num_bytes,
        "is_pinned": pinned,
        "copy_alone_s": _spread(floor_s),
        "copy_alone_bytes_per_s": num_bytes / statistics.median(floor_s),
        "pageable_copy_s": _spread(pageable_s),
        "step_s": _spread(plain_s),
        "step_with_copy_s": _spread(beside_s),
        "held_up_s": _spread(held_s),
        "lost_s": statistics.median(beside_s) - statistics.median(plain_s),
        "lost_to_copy_alone_ratio": (statistics.median(beside_s) - statistics.median(plain_s))
        / statistics.median(floor_s),
        "num_torn": num_torn,
        "num_copies": len(beside_s),
    }


class _Copier:
    """The state into host memory: on a low-priority stream of its own on a GPU, in a thread on a CPU.

    On a GPU the host never waits: the stream that updates waits on the copy by an event.
    """

    def __init__(self, state: Sequence[Any], host: Any, *, device: Any) -> None:
        import torch

        self._torch, self._state, self._host = torch, state, host
        self._is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(priority=0) if self._is_cuda else None
        self._threads = ThreadPoolExecutor(max_workers=1)
        self._copied: Any = None

    def begin(self) -> None:
        if self._stream is None:
            self._copied = self._threads.submit(self._copy)
            return
        self._stream.wait_stream(self._torch.cuda.current_stream())
        with self._torch.cuda.stream(self._stream):
            self._copy()
            self._copied = self._torch.cuda.Event()
            self._copied.record(self._stream)

    def fence(self) -> None:
        if self._copied is None:
            return
        if self._stream is None:
            self._copied.result()
        else:
            self._torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        if self._stream is None:
            self._copied.result()
        else:
            self._copied.synchronize()

    def copy_and_wait(self) -> None:
        self.begin()
        self.wait()

    def _copy(self) -> None:
        offset = 0
        for tensor in self._state:
            self._host[offset : offset + tensor.numel()].copy_(tensor, non_blocking=True)
            offset += tensor.numel()


def _pin(host: Any) -> bool:
    """Register memory that exists already, as a shared buffer does, so that the GPU can copy into it by itself."""
    import torch

    runtime: Any = torch.cuda.cudart()
    code = runtime.cudaHostRegister(ctypes.c_void_p(host.data_ptr()).value, host.nbytes, 0)
    return int(code) == 0 and host.is_pinned()


class _Products:
    """So many matrix products that they take `seconds`."""

    def __init__(self, device: Any, *, seconds: float) -> None:
        import torch

        size = 256 if device.type == "cpu" else 4096
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._left, self._right = (torch.rand(size, size, device=device, dtype=dtype) for _ in range(2))
        self._num = 10
        self()
        _synchronize(device)
        took_s = statistics.median(_timed(lambda: (self(), _synchronize(device))) for _ in range(5))
        self._num = max(1, round(10 * seconds / took_s))

    def __call__(self) -> None:
        for _ in range(self._num):
            self._left @ self._right  # pyright: ignore[reportUnusedExpression]


# --- nccl ----------------------------------------------------------------------------------------------------------


def measure_nccl(*, is_rehearsal: bool) -> Figures:
    """One rank: its communicator is aborted with work under way and made anew under a new prefix of the same store."""
    import torch
    import torch.distributed as dist

    backend = "gloo" if is_rehearsal else "nccl"
    device = torch.device("cpu" if is_rehearsal else "cuda")
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    value = torch.ones(1 << 20, device=device)

    def make(generation: int) -> Any:
        prefixed = dist.PrefixStore(f"generation-{generation}", store)
        if backend == "gloo":
            return dist.ProcessGroupGloo(prefixed, 0, 1, timedelta(seconds=30))
        return dist.ProcessGroupNCCL(prefixed, 0, 1, dist.ProcessGroupNCCL.Options())

    def use(group: Any) -> None:
        group.allreduce([value]).wait()
        _synchronize(device)

    made_s, first_s, later_s, aborted_s, again_s = [], [], [], [], []
    group = make(0)
    use(group)
    for generation in range(1, 6):
        group.allreduce([value])  # under way when it is aborted
        at_s = [time.monotonic()]
        group.abort()
        at_s.append(time.monotonic())
        group = make(generation)
        at_s.append(time.monotonic())
        for _ in range(2):
            use(group)
            at_s.append(time.monotonic())
        for times_s, begin_s, end_s in zip((aborted_s, made_s, first_s, later_s), at_s, at_s[1:], strict=False):
            times_s.append(end_s - begin_s)
        again_s.append(at_s[3] - at_s[0])
    return {
        "backend": backend,
        "abort_s": _spread(aborted_s),
        "make_s": _spread(made_s),
        "first_all_reduce_s": _spread(first_s),
        "later_all_reduce_s": _spread(later_s),
        "abort_to_first_all_reduce_s": _spread(again_s),
        "is_result_right": bool((value == 1.0).all().item()),
    }


# --- standby -------------------------------------------------------------------------------------------------------


def measure_standby(*, is_rehearsal: bool) -> Figures:
    """From the wish for a new process to its first result on the device."""
    device = "cpu" if is_rehearsal else "cuda"
    compute = f"import torch; ones = torch.ones(64, 64, device={device!r}); print(float((ones @ ones).sum()))"
    rounds = 2 if is_rehearsal else 3
    cold_s = [
        _timed(lambda: subprocess.run([sys.executable, "-c", compute], check=True, capture_output=True, timeout=60))
        for _ in range(rounds)
    ]
    import torch  # noqa: F401  # from here on every fork has it

    context = multiprocessing.get_context("fork")
    forked_s = [_answered_s(context, device=device, is_ready=False) for _ in range(rounds)]
    live_s = [_answered_s(context, device=device, is_ready=True) for _ in range(rounds)]
    return {
        "cold_s": _spread(cold_s),
        "forked_with_torch_s": _spread(forked_s),
        "live_context_s": _spread(live_s),
        "live_to_cold_ratio": statistics.median(live_s) / statistics.median(cold_s),
        "idle_standby_bytes": _standby_bytes(context, device=device),
    }


def _answered_s(context: Any, *, device: str, is_ready: bool) -> float:
    """A fork of this process, which must not have touched the device: from the go to its answer.

    `is_ready`: it made its context before and only waits; otherwise the fork itself counts too.
    """
    ours, theirs = context.Pipe()
    began_s = time.monotonic()
    process = context.Process(target=_stand_by, args=(theirs, device, is_ready), daemon=True)
    process.start()
    if is_ready:
        assert ours.poll(60) and ours.recv() == "ready"
        began_s = time.monotonic()
    ours.send("go")
    assert ours.poll(60) and ours.recv() == 64.0**3
    took_s = time.monotonic() - began_s
    process.join(10)
    return took_s


def _stand_by(pipe: Any, device: str, is_ready: bool) -> None:
    import torch

    def compute() -> float:
        ones = torch.ones(64, 64, device=device)
        return float((ones @ ones).sum())

    if is_ready:
        compute()
        pipe.send("ready")
    pipe.recv()
    pipe.send(compute())


def _standby_bytes(context: Any, *, device: str) -> float | None:
    """Device memory that one idle standby holds; None without NVML or on a CPU."""
    if device == "cpu":
        return None
    before = _nvml_sample()
    ours, theirs = context.Pipe()
    process = context.Process(target=_stand_by, args=(theirs, device, True), daemon=True)
    process.start()
    assert ours.poll(60) and ours.recv() == "ready"
    after = _nvml_sample()
    process.kill()
    process.join(10)
    return None if before is None or after is None else after["memory_bytes"] - before["memory_bytes"]


# --- mfu -----------------------------------------------------------------------------------------------------------


def measure_mfu(*, is_rehearsal: bool) -> Figures:
    """A GPT in bfloat16 on random tokens. MFU = model FLOP (6 per weight of a product, and causal attention) over the
    time and the best rate of a large product measured here."""
    import torch
    import torch.nn.functional as F

    device = torch.device("cpu" if is_rehearsal else "cuda")
    layers, width, heads, length, batch = (2, 64, 4, 64, 2) if is_rehearsal else (16, 2048, 16, 1024, 16)
    torch.manual_seed(1)
    network = _gpt(layers=layers, width=width, heads=heads, length=length).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=not is_rehearsal)
    tokens = torch.randint(0, 256, (batch, length + 1), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = network(tokens[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        _synchronize(device)

    peak = _peak_flop_per_s(device)
    for _ in range(3):
        step()
    sampler = _Sampler()
    times_s = [_timed(step) for _ in range(5 if is_rehearsal else 40)]
    samples = sampler.stop()
    num_weights = sum(p.numel() for name, p in network.named_parameters() if p.dim() == 2 and "position" not in name)
    flop = (6.0 * num_weights + 6.0 * layers * width * length) * batch * length
    step_s = statistics.median(times_s)
    return {
        "num_parameters": sum(parameter.numel() for parameter in network.parameters()),
        "tokens_per_s": batch * length / step_s,
        "step_s": _spread(times_s),
        "model_flop_per_s": flop / step_s,
        "peak_flop_per_s": peak,
        "mfu": flop / step_s / peak,
        "nvml": samples,
    }


def _gpt(*, layers: int, width: int, heads: int, length: int) -> Any:
    """Pre-norm blocks with causal attention; the vocabulary is bytes."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            parts = self.mixed(self.norm_1(x)).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.norm_2(x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

        def forward(self, tokens: Any) -> Any:
            x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return Gpt()


def _peak_flop_per_s(device: Any) -> float:
    """The best of several large products in bfloat16 on random values; 2·n³ FLOP each."""
    import torch

    size = 512 if device.type == "cpu" else 8192
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times_s = [_timed(lambda: (torch.matmul(left, right), _synchronize(device))) for _ in range(20)]
    return 2.0 * size**3 / min(times_s)


class _Sampler:
    """What NVML says, ten times a second, from a thread; None where there is none."""

    def __init__(self) -> None:
        self._samples: list[Figures] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> Figures | None:
        self._stop.set()
        self._thread.join(5)
        if not self._samples:
            return None
        names = self._samples[0]
        means = {f"{name}_mean": statistics.fmean(sample[name] for sample in self._samples) for name in names}
        peaks = {f"{name}_max": max(sample[name] for sample in self._samples) for name in names}
        return {"num_samples": len(self._samples), **means, **peaks}

    def _look(self) -> None:
        while not self._stop.wait(0.1):
            sample = _nvml_sample()
            if sample is None:
                return
            self._samples.append(sample)


def _nvml_sample() -> Figures | None:
    """Power, temperature, clock, utilisation and memory of the first GPU; None without NVML."""
    try:
        import pynvml as found
    except ImportError:
        return None
    pynvml: Any = found
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return {
            "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            "sm_clock_hz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM) * 1e6,
            "utilisation_ratio": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).used,
        }
    except pynvml.NVMLError:
        return None


# --- run -----------------------------------------------------------------------------------------------------------


def measure_run(*, is_rehearsal: bool) -> Figures:
    """`dougong run` on one rank whose state is on the GPU: durable saves, then one kill -9."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench")]
    os.environ |= {"BENCH_DEVICE": "cpu" if is_rehearsal else "cuda", "BENCH_RANKS": "1"}
    try:
        from _run_kills import measure as measure_kills
        from _run_saves import METHODS
        from _run_saves import measure as measure_saves
    except ImportError as error:
        return {"skipped": f"Dougong's own packages are not there: {error}"}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    state_mb, rounds = (20.0, 1) if is_rehearsal else (4000.0, 3)
    ours = next(method for method in METHODS if method.name == "Dougong")
    with tempfile.TemporaryDirectory(prefix="dougong-gpu-") as folder:
        root = Path(folder)
        saves = measure_saves(ours, is_busy=False, rounds=rounds, state_mb=state_mb, directory=root / "saves")
        kills = measure_kills(ours.system, kills=rounds, is_full=True, state_mb=state_mb, directory=root / "kills")
    import msgspec

    return {"saves": msgspec.to_builtins(saves), "kills": msgspec.to_builtins(kills)}


PARTS: dict[str, Callable[..., Figures]] = {
    "copies": measure_copies,
    "nccl": measure_nccl,
    "standby": measure_standby,
    "mfu": measure_mfu,
    "run": measure_run,
}


def _machine() -> Figures:
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {"gpu": gpu, "torch": str(torch.__version__), "num_cpus": len(os.sched_getaffinity(0))}


def _synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def _timed(act: Callable[[], Any]) -> float:
    began_s = time.monotonic()
    act()
    return time.monotonic() - began_s


def _spread(values: Sequence[float]) -> Figures:
    return {"median": round(statistics.median(values), 6), "range": [round(min(values), 6), round(max(values), 6)]}


def _write(path: Path, result: Figures) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, small")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "gpu.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
