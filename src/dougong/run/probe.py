"""The agent's part of a pre-flight: fork the tests of its node's ranks, wait for their answers, end what is left."""

from __future__ import annotations

import asyncio
import shutil

import msgspec

from dougong.backend.local import process
from dougong.run.layout import NodeDirectory, RunDirectory
from dougong.run.letters import Probed, read_from_worker, unread
from dougong.run.place import PreflightPlace, preflight_variables
from dougong.run.settings import RunSettings
from dougong.run.wire import Preflight, Preflighted
from dougong.run.zygote_link import ZygoteLink

_POLL_S = 0.02


async def probe(
    order: Preflight, *, node: NodeDirectory, run: RunDirectory, settings: RunSettings, zygote: ZygoteLink
) -> Preflighted:
    """The node's answer: of its slowest rank, and right only if every rank was. `free_port` is left 0."""
    shutil.rmtree(node.preflight_box, ignore_errors=True)
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + order.timeout_s
    pids: dict[int, int] = {}
    try:
        try:
            for local_rank in range(settings.procs_per_node):
                rank = order.node_index * settings.procs_per_node + local_rank
                pids[rank] = await _start(order, rank, local_rank, node=node, run=run, settings=settings, zygote=zygote)
        except (OSError, ConnectionError) as error:
            return _failed(order, str(error))
        probed: dict[int, Probed] = {}
        while len(probed) < len(pids):
            probed.update(_answers(order, node))
            dead = [rank for rank, pid in pids.items() if rank not in probed and not process.is_alive(pid)]
            # a letter may have come between the two looks
            probed.update(_answers(order, node))
            if missing := [rank for rank in dead if rank not in probed]:
                return _failed(order, f"the test of rank {missing[0]} ended without an answer (logs/preflight.log)")
            if loop.time() > ends_s:
                return _failed(order, f"no answer within {order.timeout_s:g} s")
            await asyncio.sleep(_POLL_S)
        return _joined(order, tuple(probed.values()))
    finally:
        for pid in pids.values():
            process.kill(pid)


async def _start(
    order: Preflight,
    rank: int,
    local_rank: int,
    *,
    node: NodeDirectory,
    run: RunDirectory,
    settings: RunSettings,
    zygote: ZygoteLink,
) -> int:
    place = PreflightPlace(
        serial=order.serial,
        stage=order.stage,
        rank=rank,
        local_rank=local_rank,
        world_size=2 * settings.procs_per_node,
        master_address=order.master_address,
        master_port=order.master_port,
        timeout_s=order.timeout_s,
        box=str(node.preflight_box),
    )
    log_path = run.logs / "preflight.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    return await zygote.fork(variables=preflight_variables(place), log_path=log_path, entry="preflight")


def _answers(order: Preflight, node: NodeDirectory) -> dict[int, Probed]:
    found: dict[int, Probed] = {}
    for path in unread(node.preflight_box):
        try:
            letter = read_from_worker(path)
        except (OSError, msgspec.MsgspecError):
            continue
        if isinstance(letter, Probed) and letter.generation == order.serial:
            found[letter.rank] = letter
    return found


def _joined(order: Preflight, probed: tuple[Probed, ...]) -> Preflighted:
    return Preflighted(
        serial=order.serial,
        stage=order.stage,
        free_port=0,
        flop_per_s=min((one.flop_per_s for one in probed if one.flop_per_s is not None), default=None),
        bytes_per_s=min((one.bytes_per_s for one in probed if one.bytes_per_s is not None), default=None),
        is_exact=all(one.is_exact for one in probed),
    )


def _failed(order: Preflight, reason: str) -> Preflighted:
    return Preflighted(serial=order.serial, stage=order.stage, free_port=0, failure=reason)
