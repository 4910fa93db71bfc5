"""Trains under one layout with as many ranks as asked, saves, goes on with other numbers of ranks, and compares.

`resized.py LAYOUT ROOT SIZE [SIZE …]`: each size is a world of its own, of new processes. The first one starts afresh;
each later one loads what the one before saved, and its whole state is compared bit for bit with what that one had.
One line of JSON per world is printed.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import dougong  # noqa: E402
from dougong.run import manifest  # noqa: E402
from dougong.run.capture import write_snapshot  # noqa: E402
from dougong.run.dcp_read import DurableState  # noqa: E402
from dougong.run.dcp_shard import write_metadata, write_shard  # noqa: E402
from dougong.run.manifest import LocalPlace, Manifest  # noqa: E402
from dougong.run.reshard import state_for  # noqa: E402
from dougong.run.sharding import Sharding  # noqa: E402
from dougong.run.snapshot import SnapshotFiles  # noqa: E402
from dougong.run.state import Progress, gather, is_array, put_back, read_tree  # noqa: E402
from dougong.run.tree import dismantle  # noqa: E402

NUM_STEPS = 3


class Net(nn.Module):
    """Sizes that no world size divides, a scalar-like bias, and, if asked, buffers."""

    def __init__(self, *, width: int = 14, has_norm: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(5, width)
        self.norm = nn.BatchNorm1d(width) if has_norm else nn.Identity()
        self.down = nn.Linear(width, 3)
        self.last = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.down(torch.relu(self.norm(self.up(x))))))


class World:
    """One rank's objects, and how they are to be told to `Sharding`."""

    def __init__(self, layout: str, *, rank: int, world_size: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.rank, self.world_size = rank, world_size
        self.told: dict[str, Any] = {}
        self.is_stage_first = True
        self.dp_group: Any = None
        getattr(self, f"_{layout}")()
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)
        self.parts = {"model": self.model, "optimizer": self.optimizer, "lr_scheduler": scheduler}

    def sharding(self) -> Sharding:
        return Sharding(self.parts, rank=self.rank, world_size=self.world_size, **self.told)

    def train(self, *, num_steps: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed + self.data_rank)
        for _ in range(num_steps):
            loss = self.model(torch.randn(4, self.num_inputs, generator=generator)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            if self.dp_group is not None:
                for parameter in self.model.parameters():
                    grad = parameter.grad
                    dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=self.dp_group)
            self.optimizer.step()
            self.parts["lr_scheduler"].step()

    data_rank = 0
    num_inputs = 5
    stage = 0
    group: Any = None

    def _ddp(self) -> None:
        self.data_rank = self.rank
        self.model = DistributedDataParallel(Net(has_norm=True))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def _own_buffers(self) -> None:
        self.data_rank = self.rank
        self.model = DistributedDataParallel(Net(has_norm=True), broadcast_buffers=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def _zero(self) -> None:
        self.data_rank = self.rank
        self.model = DistributedDataParallel(Net())
        groups = [{"params": [p for p in self.model.parameters() if p.dim() == d], "lr": 0.01 * d} for d in (2, 1)]
        self.optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.Adam, lr=1e-2)

    def _fsdp(self) -> None:
        self.data_rank = self.rank
        self.model = Net(has_norm=True)
        for layer in (self.model.up, self.model.down, self.model.last):
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def _hsdp(self) -> None:
        self.data_rank = self.rank
        mesh = init_device_mesh("cpu", (2, self.world_size // 2), mesh_dim_names=("replicate", "shard"))
        self.model = Net()
        for layer in (self.model.up, self.model.down, self.model.last):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def _tp(self) -> None:
        """Tensor parallel over 2 ranks; its groups are replicas, with gradients summed by hand."""
        mesh = init_device_mesh("cpu", (self.world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        self.data_rank = self.rank // 2
        self.dp_group = mesh.get_group("dp")
        self.model = Net()
        parallelize_module(self.model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)

    def _fsdp_tp(self) -> None:
        mesh = init_device_mesh("cpu", (self.world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        self.data_rank = self.rank // 2
        self.model = Net(width=16)
        parallelize_module(self.model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for layer in (self.model.up, self.model.down, self.model.last):
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(self.model, mesh=mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)

    def _pipeline(self) -> None:
        """Two stages that use the same names for other parameters; replicas of a stage under DDP."""
        stage = self._stage()
        self.told = {"stage": stage}

    def _named_pipeline(self) -> None:
        """Two stages whose parameters have the names of the whole model, as torch's own pipelines have."""
        self._stage(has_own_name=True)
        self.told = {"replicated_over": dist.get_process_group_ranks(self.group)}

    def _stage(self, *, has_own_name: bool = False) -> int:
        stage, self.data_rank = divmod(self.rank, self.world_size // 2)
        groups = [dist.new_group(range(s * self.world_size // 2, (s + 1) * self.world_size // 2)) for s in (0, 1)]
        torch.manual_seed(100 + stage + torch.initial_seed())
        layer: nn.Module = nn.Sequential(nn.Linear(5 + stage, 7), nn.ReLU(), nn.Linear(7, 2))
        self.num_inputs = 5 + stage
        if has_own_name:
            inner, layer = layer, nn.ModuleDict({f"layer{stage}": layer})
            layer.forward = inner.forward
        self.group = groups[stage]
        self.model = DistributedDataParallel(layer, process_group=self.group)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.stage = stage
        return stage

    # --- what all ranks have together, by other means than those under test ---

    def reference(self) -> dict[str, torch.Tensor]:
        """Every tensor of model and optimizer, whole, by name; those of one rank alone with its number."""
        model = getattr(self.model, "module", self.model)
        prefix = f"stage{self.told['stage']}." if "stage" in self.told else ""
        found = {f"{prefix}model.{name}": _whole(value) for name, value in model.state_dict().items()}
        state: dict[int, Any] = {}
        for rank in range(self.world_size):
            if isinstance(self.optimizer, ZeroRedundancyOptimizer):
                self.optimizer.consolidate_state_dict(to=rank)
            if rank == self.rank:
                state = self.optimizer.state_dict()["state"]
        order = [p for group in self.optimizer.param_groups for p in group["params"]]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for number, values in state.items():
            name = names[id(order[number])]
            found |= {f"{prefix}optimizer.{name}.{key}": _whole(value) for key, value in values.items()}
        found["lr"] = torch.tensor([group["lr"] for group in self.optimizer.param_groups])
        return found


def _whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def save(world: World, root: Path, *, step: int) -> None:
    """As a run saves: a memory checkpoint, then the shards, the index and the mark."""
    rank, directory = world.rank, str(root / manifest.directory_name(step, generation=1))
    files = SnapshotFiles(root / f"memory-{world.world_size}-{rank}")
    tree = gather(world.parts, data={"position": step}, progress=Progress(step=step, num_tokens=10 + rank))
    index, num_bytes = write_snapshot(
        files, tree, step=step, generation=1, world_size=world.world_size, sharding=world.sharding()
    )
    written = write_shard(files.buffer(index)[:num_bytes], place=LocalPlace(), directory=directory, rank=rank)
    gathered: list[Any] = [None] * world.world_size
    dist.all_gather_object(gathered, written)
    if rank == 0:
        items = [item for _, items in gathered for item in items]
        metadata = write_metadata(items, place=LocalPlace(), directory=directory)
        record = Manifest(
            format_version=manifest.FORMAT_VERSION,
            run_id="r",
            step=step,
            generation=1,
            world_size=world.world_size,
            time_ns=1,
            files=(*(file for files, _ in gathered for file in files), metadata),
        )
        manifest.commit(str(root), record)
    dist.barrier()


def load(world: World, root: Path, *, step: int) -> dict[str, Any]:
    directory = manifest.directory_name(step, generation=1)
    size = manifest.verify(str(root), directory).world_size
    with DurableState(LocalPlace(), f"{root}/{directory}", world_size=size) as saved:
        once = state_for(world.parts, sharding=world.sharding(), saved=saved, is_read_once=True)
        alone = state_for(world.parts, sharding=world.sharding(), saved=saved)
    (skeleton, leaves), (other, others) = (dismantle(tree, is_leaf=is_array) for tree in (once, alone))
    assert skeleton == other
    unlike = [
        str(a.path)
        for a, b in zip(leaves, others, strict=True)
        if not torch.as_tensor(a.value).equal(torch.as_tensor(b.value))
    ]
    progress = put_back(once, world.parts)
    return {
        "step": progress.step,
        "num_tokens": progress.num_tokens,
        "rng": int(once["rng"]["torch"].sum()),
        "unlike_read_alone": unlike,
    }


def is_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """The names that differ in any bit."""
    differing = set(left) ^ set(right)
    for name in set(left) & set(right):
        if not left[name].equal(right[name]) or left[name].dtype != right[name].dtype:
            differing.add(name)
    return sorted(differing)


def differing_by_plain_dcp(world: World, root: Path, *, step: int) -> list[str]:
    """Fill another state by `torch.distributed.checkpoint` itself, and compare with this rank's."""
    model = getattr(world.model, "module", world.model)
    wanted = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, world.optimizer)}
    own = gather(world.parts, data=None, progress=Progress(step=0, num_tokens=0))
    flat: dict[str, torch.Tensor] = {}
    for tree in (wanted, own):
        values = {
            **{f"model.{k}": v for k, v in tree["model"].items()},
            **{f"{n}.{k}": v for n, s in tree["optimizer"]["state"].items() for k, v in s.items()},
        }
        flat = {
            name: (value.to_local() if isinstance(value, DTensor) else value).clone() for name, value in values.items()
        }
        if tree is wanted:
            target = {"model": _zeroed(tree["model"]), "optimizer": _zeroed(tree["optimizer"])}
            target["model"] = {k: v for k, v in target["model"].items() if "norm" not in k}
            dcp_load(target, checkpoint_id=root / manifest.directory_name(step, generation=1))
            loaded = {
                **{f"model.{k}": v for k, v in target["model"].items()},
                **{f"{n}.{k}": v for n, s in target["optimizer"]["state"].items() for k, v in s.items()},
            }
            got = {n: v.to_local() if isinstance(v, DTensor) else v for n, v in loaded.items()}
    return sorted(name for name in got if not got[name].equal(flat[name]))


def _zeroed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: _zeroed(item) for key, item in value.items()}
    return value


def one_rank(layout: str, root: Path, *, rank: int, world_size: int, number: int) -> dict[str, Any]:
    if layout == "ddp":  # over a group that can be replaced
        dougong.init_process_group()
    else:
        dist.init_process_group("gloo")
    said: dict[str, Any] = {"rank": rank, "differing": []}
    world = World(layout, rank=rank, world_size=world_size, seed=number)
    # of the buffers that DDP broadcasts, those of rank 0 count
    mine = root / f"reference-{number - 1}-{0 if layout == 'ddp' else rank}.pt"
    if "pipeline" in layout and number:
        before_size = int(sys.argv[2 + number])
        mine = root / f"reference-{number - 1}-{world.stage * before_size // 2}.pt"
    if number:
        sizes = [int(text) for text in sys.argv[3:]]
        before_size = sizes[number - 1]
        predecessor = root / f"reference-{number - 1}-{rank % before_size}.pt"
        said |= load(world, root, step=number * NUM_STEPS)
        before = torch.load(mine if mine.exists() else predecessor)
        said["differing"] = is_equal(world.reference(), before)
    world.train(num_steps=NUM_STEPS, seed=1000 * number)
    save(world, root, step=(number + 1) * NUM_STEPS)
    reference = world.reference()
    torch.save(reference, root / f"reference-{number}-{rank}.pt")
    if layout != "zero" and "pipeline" not in layout:
        said["plain_dcp"] = differing_by_plain_dcp(world, root, step=(number + 1) * NUM_STEPS)
    world.train(num_steps=1, seed=7)
    put_back(
        read_tree(SnapshotFiles(root / f"memory-{world_size}-{rank}").read(step=(number + 1) * NUM_STEPS)), world.parts
    )
    said["differing_from_memory"] = is_equal(world.reference(), reference)
    dist.barrier()
    dist.destroy_process_group()
    return said


def main() -> None:
    layout, root = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    for number, text in enumerate(sys.argv[3:]):
        world_size = int(text)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ |= {"WORLD_SIZE": text, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        children: list[int] = []
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                os.environ["RANK"] = str(rank)
                code = 1
                try:
                    said = one_rank(layout, root, rank=rank, world_size=world_size, number=number)
                    (root / f"said-{number}-{rank}.json").write_text(json.dumps(said))
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            children.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        if any(codes):
            sys.exit(f"world {number} of {world_size} ranks ended with {codes}")
        said = [json.loads((root / f"said-{number}-{rank}.json").read_text()) for rank in range(world_size)]
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
