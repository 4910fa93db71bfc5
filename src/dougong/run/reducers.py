# pyright: standard, reportPrivateUsage=false, reportPrivateImportUsage=false
"""Gives every DistributedDataParallel model a reducer of its own again, with the buckets that it had.

A reducer sorts gradients into buckets in the order in which they arrived in its first backward pass. One that failed in
the middle of a pass is of no more use, and a rank that is new has seen no pass yet; so after a restart all ranks begin
anew. Where a gradient lies in a bucket decides in which order three and more ranks add it up, so the buckets of the
first step must be those of an undisturbed run: the order of arrival is remembered with the state.

Source: torch/nn/parallel/distributed.py (`_ddp_init_helper`, `__setstate__`) and reducer.cpp (`rebuild_buckets`) of
torch 2.13; the reducer's destructor takes its hooks off the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

Orders = tuple[tuple[int, ...], ...]
"""For each DDP model among the parts: the numbers of its parameters in the order in which their gradients arrived."""


class ArrivalOrders:
    """Watches the first backward pass of each DDP model among the parts, and only that."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self._watched = [_Arrivals(model) for model in _models(parts)]

    @property
    def orders(self) -> Orders:
        """What is known so far; () for a model that has had no whole pass, or whose buckets stay as they are."""
        return tuple(arrivals.known() for arrivals in self._watched)

    def take(self, orders: Sequence[Sequence[int]]) -> None:
        """What was known when the state was saved."""
        for arrivals, order in zip(self._watched, orders, strict=False):
            arrivals.take(tuple(order))


def renew_reducers(parts: Iterable[Any], orders: Orders) -> None:
    """For every DDP model among the parts or within them. All ranks call this together; rank 0's orders count."""
    models = _models(parts)
    for index, model in enumerate(models):
        own = orders[index] if index < len(orders) else ()
        _renew(model, _agreed(model, own))


def _models(parts: Iterable[Any]) -> list[Any]:
    return [
        module
        for part in parts
        if isinstance(part, torch.nn.Module)
        for module in part.modules()
        if isinstance(module, DistributedDataParallel)
    ]


class _Arrivals:
    """The order of one model."""

    def __init__(self, model: Any) -> None:
        self._order: tuple[int, ...] = ()
        self._num_parameters = 0
        self._seen: dict[int, None] = {}
        self._hooks: list[Any] = []
        if not _is_rebuilt(model):
            return
        parameters = model._build_params_for_reducer()[0]
        self._num_parameters = len(parameters)
        for number, parameter in enumerate(parameters):
            self._hooks.append(parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._see(number)))

    def known(self) -> tuple[int, ...]:
        """Asked between two passes: a hook cannot be taken off while it is called."""
        if not self._order and self._num_parameters and len(self._seen) == self._num_parameters:
            self.take(tuple(self._seen))
        return self._order

    def take(self, order: tuple[int, ...]) -> None:
        if len(order) != self._num_parameters:
            return
        self._order = order
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _see(self, number: int) -> None:
        self._seen[number] = None


def _is_rebuilt(model: Any) -> bool:
    """Does the model sort its gradients anew after the first pass?"""
    return (model.static_graph or not model.find_unused_parameters) and model.mixed_precision is None


def _agreed(model: Any, own: tuple[int, ...]) -> tuple[int, ...]:
    """Rank 0's order: different buckets on two ranks would add up different gradients."""
    if not _is_rebuilt(model):
        return ()
    parameters = model._build_params_for_reducer()[0]
    order = torch.full((len(parameters),), -1, dtype=torch.int64, device=parameters[0].device)
    if len(own) == len(parameters):
        order.copy_(torch.tensor(own))
    dist.broadcast(order, src=dist.get_global_rank(model.process_group, 0), group=model.process_group)
    found = tuple(cast("list[int]", order.tolist()))
    return found if sorted(found) == list(range(len(parameters))) else ()


def _renew(model: Any, order: tuple[int, ...]) -> None:
    hooks: list[Any] = list(getattr(model, "_comm_hooks", ()))
    del model.logger
    del model.reducer
    parameters, expects_sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    assign = _as_after_the_first_pass(model, order) if order else dist._compute_bucket_assignment_by_size
    with mock.patch.object(dist, "_compute_bucket_assignment_by_size", assign):
        model._ddp_init_helper(parameters, expects_sparse, names, model.static_graph)
    if model.static_graph:
        model.reducer._set_static_graph()
        model.logger._set_static_graph()
    for hook, state in hooks:
        dist._register_comm_hook(model.reducer, state, hook)


def _as_after_the_first_pass(model: Any, order: tuple[int, ...]) -> Any:
    """What the reducer itself computes once it knows the order."""
    compute = dist._compute_bucket_assignment_by_size

    def assign(parameters: Sequence[torch.Tensor], _limits: Any, expects_sparse: list[bool]) -> Any:
        config = model._bucket_config
        _, limits = config.compute_bucket_size_limits(
            static_graph=model.static_graph, find_unused_parameters=model.find_unused_parameters
        )
        limits = limits or [config.first_bucket_bytes_cap, config.bucket_bytes_cap]
        arrived = [parameters[number] for number in order]
        indices, sizes = compute(arrived, limits, expects_sparse, list(order))
        return list(reversed(indices)), list(reversed(sizes))  # the caller turns them round

    return assign
