# pyright: reportPrivateImportUsage=false, reportMissingImports=false
# torch exports its checkpoint functions unmarked.
"""Is a saved state whole? Read back as any torch script would, in a process of its own.

    python bench/_run_verify.py dcp | torch DIRECTORY

The training of `bench/peers/` writes the number of the step into every value, so a tensor that was copied while the
optimizer changed it, or beside tensors of another step, is seen.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec

LIMIT_S = 120.0
_STEP = re.compile(r"(?:step-)?(\d+)(?:-g\d+)?")
SHOWN = 5


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`steps`: those found in the tensors; one if the state is whole. `torn`: tensors with several, the first few."""

    directory: str
    num_tensors: int
    num_bytes: int
    steps: tuple[int, ...]
    torn: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        return len(self.steps) == 1 and not self.torn and self.num_tensors > 0


def newest(root: Path, *, before_last: int = 0) -> Path:
    """The directory of the newest step under `root`, or one `before_last` places before it."""
    named = [(int(number[1]), path) for path in root.iterdir() if (number := _STEP.fullmatch(path.name))]
    if not named:
        raise RuntimeError(f"no checkpoint in {root}")
    return sorted(named)[max(0, len(named) - 1 - before_last)][1]


def verify(kind: str, directory: Path) -> Verdict:
    """Raises RuntimeError if it cannot be read at all."""
    command = (sys.executable, str(Path(__file__).resolve()), kind, str(directory))
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != 0:
        raise RuntimeError(f"{directory} cannot be read back:\n{done.stderr[-2000:]}")
    return msgspec.json.decode(done.stdout, type=Verdict)


def main() -> None:
    import torch

    kind, directory = sys.argv[1], Path(sys.argv[2])
    tensors = _of_dcp(directory) if kind == "dcp" else _of_torch_files(directory)
    sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
    from _work import start_value

    steps: set[int] = set()
    torn: list[str] = []
    num_bytes = 0
    for name, tensor in tensors.items():
        assert isinstance(tensor, torch.Tensor)
        num_bytes += tensor.nbytes
        low, high = (float(value) for value in torch.aminmax(tensor))
        plain = name.rsplit(".", 1)[-1]
        base, each = {"exp_avg": (0.0, 1.0), "exp_avg_sq": (0.0, 2.0)}.get(plain) or (start_value(plain), 1.0)
        if low != high:
            torn.append(name)
        steps |= {round((low - base) / each), round((high - base) / each)}
    verdict = Verdict(
        directory=directory.name,
        num_tensors=len(tensors),
        num_bytes=num_bytes,
        steps=tuple(sorted(steps)),
        torn=tuple(torn[:SHOWN]),
    )
    print(msgspec.json.encode(verdict).decode())


def _of_dcp(directory: Path) -> dict[str, object]:
    """Everything of float32 in it, by plain `torch.distributed.checkpoint.load`, without a process group."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    described = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    state: dict[str, object] = {
        name: torch.full(tuple(what.size), float("nan"))
        for name, what in described.items()
        if isinstance(what, TensorStorageMetadata) and what.properties.dtype == torch.float32
    }
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    return state


def _of_torch_files(directory: Path) -> dict[str, object]:
    """`rank-R.pt` of torch.save, or `rank_R.pt` of DLRover."""
    import torch

    found: dict[str, object] = {}

    def take(prefix: str, value: object) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                take(f"{prefix}.{key}", item)
        elif isinstance(value, torch.Tensor) and value.dtype == torch.float32:
            found[prefix] = value

    for path in sorted(directory.glob("rank?*.pt")):
        take(path.stem, torch.load(path, weights_only=True))
    return found


if __name__ == "__main__":
    main()
