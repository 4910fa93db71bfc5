# pyright: standard
"""An optimizer's state by the names of its parameters, so that it fits whatever world the job has next.

torch numbers the parameters of an optimizer; here the state of each stands under the parameter's fully qualified name,
in the layout that `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` has too:
`{"state": {name: {"exp_avg": …}}, "param_groups": [{"params": [name, …], "lr": …}]}`. Of a
`ZeroRedundancyOptimizer` (ZeRO-1) each rank has the state of its own parameters, without any consolidation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dougong.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
Names = Mapping[int, str]
"""Names of parameters by the `id` of the tensor."""


def is_zero(optimizer: Any) -> TypeGuard[ZeroRedundancyOptimizer]:
    """Is it ZeRO-1? Its module is not imported for the question: that takes long, and warns."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def unwrapped(part: Any) -> Any:
    """DDP's inner module, so that a checkpoint loads without DDP too."""
    return part.module if isinstance(part, DistributedDataParallel) else part


def local_part(value: Any) -> Any:
    """What this rank holds of a leaf: the local tensor of a DTensor, sharing its memory; anything else as it is."""
    return value.to_local().detach() if isinstance(value, DTensor) else value


def parameter_names(parts: Mapping[str, Any]) -> dict[int, str]:
    """Names of the parameters of all modules; those of other modules than `model` begin with the part's name."""
    names: dict[int, str] = {}
    for part_name, part in parts.items():
        if not isinstance(part, nn.Module):
            continue
        prefix = "" if part_name == "model" else f"{part_name}."
        for name, parameter in unwrapped(part).named_parameters():
            names.setdefault(id(parameter), prefix + _bare(name))
    return names


def optimizer_tree(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Any]:
    """Its `state_dict()` with names for numbers; parameters that no module has keep their number."""
    keys = _keys(optimizer, names)
    if is_zero(optimizer):
        _refuse_overlap(optimizer)
        tree = torch.optim.Optimizer.state_dict(optimizer)
        own = {id(parameter): values for parameter, values in optimizer.optim.state.items()}
        by_key = {key: dict(own[identity]) for identity, key in keys.items() if identity in own}
    else:
        tree = optimizer.state_dict()
        numbered = list(keys.values())
        by_key = {numbered[number]: values for number, values in tree["state"].items()}
    groups = [
        {**group, "params": [keys[id(parameter)] for parameter in live["params"]]}
        for group, live in zip(tree["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {**tree, "state": by_key, "param_groups": groups}


def load_optimizer(optimizer: torch.optim.Optimizer, tree: Mapping[str, Any], names: Names) -> None:
    """Put a tree as from `optimizer_tree` back. State that the optimizer does not have yet is made.

    Raises ValueError if the parameters are not the same.
    """
    parameters = parameters_by_key(optimizer, names)
    keys = _keys(optimizer, names)
    saved = [set(group["params"]) for group in tree["param_groups"]]
    present = [{keys[id(parameter)] for parameter in group["params"]} for group in optimizer.param_groups]
    if saved != present:
        differing = sorted(map(str, set().union(*saved) ^ set().union(*present)))
        raise ValueError(
            f"its parameters or their groups differ: {', '.join(differing[:5]) or 'the same ones, grouped'}"
        )
    state = {key: _as_of(parameters[key], values) for key, values in tree["state"].items()}
    if is_zero(optimizer):
        _load_own_part(optimizer, {parameters[key]: values for key, values in state.items()}, tree["param_groups"])
        return
    numbers = {key: number for number, key in enumerate(parameters)}
    following = iter(range(len(parameters)))
    groups = [
        {**group, "params": [next(following) for _ in live["params"]]}
        for group, live in zip(tree["param_groups"], optimizer.param_groups, strict=True)
    ]
    numbered = {numbers[key]: values for key, values in state.items()}
    optimizer.load_state_dict({**tree, "state": numbered, "param_groups": groups})


def parameters_by_key(optimizer: torch.optim.Optimizer, names: Names) -> dict[str | int, torch.Tensor]:
    """Every parameter under the key that its state has in the tree."""
    return dict(zip(_keys(optimizer, names).values(), _parameters(optimizer), strict=True))


def owned_keys(optimizer: torch.optim.Optimizer, names: Names) -> frozenset[str | int]:
    """The parameters whose state this rank holds: all, or under ZeRO-1 its own."""
    everything = parameters_by_key(optimizer, names)
    if not is_zero(optimizer):
        return frozenset(everything)
    own = {id(parameter) for group in optimizer.optim.param_groups for parameter in group["params"]}
    return frozenset(key for key, parameter in everything.items() if id(parameter) in own)


def is_like_parameter(key: object, shape: tuple[int, ...], parameter: torch.Tensor) -> bool:
    """Is it state for each element of the parameter, and so sharded as the parameter is?"""
    return key != "step" and shape == tuple(parameter.shape)


def as_dtensor(local: torch.Tensor, like: DTensor) -> DTensor:
    """A rank's local part as a DTensor that is laid out as `like`, which it must fit.

    Raises ValueError if the shapes differ.
    """
    expected = local_part(like)
    if local.shape != expected.shape:
        raise ValueError(f"its part on this rank has shape {list(expected.shape)}, the saved one {list(local.shape)}")
    return DTensor.from_local(
        local.to(expected.device), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


def _as_of(parameter: torch.Tensor, values: Any) -> Any:
    """The state of one parameter, its local parts made DTensors if the parameter is one."""
    if not isinstance(parameter, DTensor) or not isinstance(values, Mapping):
        return values
    local_shape = tuple(local_part(parameter).shape)
    return {
        key: as_dtensor(value, parameter)
        if isinstance(value, torch.Tensor) and key != "step" and tuple(value.shape) == local_shape
        else value
        for key, value in values.items()
    }


def _load_own_part(
    optimizer: ZeroRedundancyOptimizer, state: Mapping[torch.Tensor, Any], groups: list[dict[str, Any]]
) -> None:
    _refuse_overlap(optimizer)
    optimizer.optim.state.clear()
    for parameter, values in state.items():
        optimizer.optim.state[parameter] = {key: _beside(parameter, value) for key, value in values.items()}
    for target in (optimizer.param_groups, optimizer.optim.param_groups):
        for group, saved in zip(target, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})


def _beside(parameter: torch.Tensor, value: Any) -> Any:
    """On the parameter's device, except for scalars such as Adam's step, which stay on the CPU."""
    return value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() > 0 else value


def _refuse_overlap(optimizer: ZeroRedundancyOptimizer) -> None:
    if optimizer._overlap_with_ddp:
        raise UserError(
            "a ZeroRedundancyOptimizer with overlap_with_ddp=True has no state that can be read between steps",
            where="attach(optimizer=…)",
            mend="use overlap_with_ddp=False",
        )


def _keys(optimizer: torch.optim.Optimizer, names: Names) -> dict[int, str | int]:
    """By the `id` of each parameter, in torch's order: its name, or its number where no module has it."""
    return {id(parameter): names.get(id(parameter), number) for number, parameter in enumerate(_parameters(optimizer))}


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _bare(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
