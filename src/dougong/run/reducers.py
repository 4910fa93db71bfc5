# pyright: standard, reportPrivateUsage=false, reportPrivateImportUsage=false
"""Gives every DistributedDataParallel model a reducer of its own again.

A reducer sorts gradients into buckets in the order in which they arrived in its first backward pass, and one that
failed in the middle of a pass is of no more use. Ranks that stayed and a rank that is new must have equal buckets, so
all of them begin anew.
Source: torch/nn/parallel/distributed.py of torch 2.13, `__setstate__`, which does the same after unpickling; the
reducer's destructor takes its hooks off the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def renew_reducers(parts: Iterable[Any]) -> None:
    """For every DDP model among the parts or within them. No collective."""
    for part in parts:
        if isinstance(part, torch.nn.Module):
            for module in part.modules():
                if isinstance(module, DistributedDataParallel):
                    _renew(module)


def _renew(model: Any) -> None:
    hooks: list[Any] = list(getattr(model, "_comm_hooks", ()))
    del model.logger
    del model.reducer
    parameters, expects_sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, expects_sparse, names, model.static_graph)
    if model.static_graph:
        model.reducer._set_static_graph()
        model.logger._set_static_graph()
    for hook, state in hooks:
        dist._register_comm_hook(model.reducer, state, hook)
