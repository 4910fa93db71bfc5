"""What to do next with a job: a pure function from what is known to one decision with its reason.

The controller loads the state, asks `decide`, and applies the answer; then again. Nothing here touches the world, so
every path can be tested without a process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from dougong.event.kinds import CauseClass, Placed, Rung
from dougong.run.cut_links import reach_each_other
from dougong.run.hang import Finding, FindingKind
from dougong.run.restore_choice import choose_restore as choose_restore
from dougong.run.settings import Policy


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node as the controller knows it. `silent_s` = since its agent was last heard; 0 while connected."""

    component: str
    is_connected: bool
    is_lost: bool
    is_ready: bool = True
    """Nothing of an earlier start runs on it any more."""
    was_connected: bool = True
    silent_s: float = 0.0
    is_quarantined: bool = False
    """It may answer, but is given no work."""
    undead: str = ""
    """Workers that SIGKILL does not end, in words."""
    is_agent_asked: bool = False
    """A new agent was asked for and its backend did not refuse."""
    is_expected: bool = False
    """It is lost, but its backend has it again, and its agent was asked for."""


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that no longer works. `order` sorts losses of one moment: the cause before those it takes along."""

    rank: int
    component: str
    cause_class: CauseClass
    detail: str
    order: tuple[int, int] = (0, 0)
    onset_ns: int | None = None
    traceback: str = ""
    is_failure: bool = True
    """Does it count among the failures without a new step? Not if only another source is to be chosen."""


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """All that a decision may depend on."""

    status: Literal["gathering", "preflight", "running", "tearing-down", "backing-off", "ended"]
    generation: int
    procs_per_node: int
    num_nodes: int
    """As many as are wanted."""
    placement: tuple[Placed, ...]
    nodes: tuple[NodeView, ...]
    """Active ones first, then spares, in order of preference."""
    losses: tuple[Loss, ...] = ()
    loss_settle_s: float = 0.0
    """Since the first loss of this generation was seen."""
    finding: Finding | None = None
    finished_ranks: tuple[int, ...] = ()
    killed_nodes: tuple[str, ...] = ()
    teardown_s: float = 0.0
    backoff_left_s: float = 0.0
    gathering_s: float = 0.0
    num_restarts: int = 0
    num_fruitless: int = 0
    can_stay: tuple[int, ...] = ()
    """Ranks that could go on in their processes when a peer is replaced."""
    staying: tuple[int, ...] = ()
    """Those that were asked to, in the recovery at hand."""
    unwound: tuple[int, ...] = ()
    """Those that have left their broken step and wait."""
    slow_step_s: float = 0.0
    rung: Rung = "first"
    is_restored: bool = True
    """Does every rank of this generation hold its state?"""
    running_s: float = 0.0
    is_stop_wanted: bool = False
    is_stop_complete: bool = False
    min_nodes: int = 0
    """With how few nodes the job may go on; 0 = only with all that are wanted."""
    is_attached: bool = False
    is_growing: bool = False
    """The ranks were asked to save and leave, so that a larger world can start."""
    has_left: bool = False
    """They have."""
    give_up: str = ""
    """A policy wants the job to be given up after this loss; why."""
    untested: tuple[str, ...] = ()
    """Nodes that must pass a test before they are given work."""
    keepers: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Nodes, and which others keep copies of their memory checkpoints."""
    is_probing: bool = False
    """The nodes are trying whether they reach each other."""
    cut_links: tuple[tuple[str, str], ...] = ()
    """Pairs of nodes that do not."""

    @property
    def is_gathered(self) -> bool:
        """Are the nodes that were chosen to train there, as far as they will be?"""
        return all((node.is_connected and node.is_ready) or node.is_lost for node in self.nodes[: self.num_nodes])


class Wait(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    reason: str


class RestartAgent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    component: str
    reason: str
    others: tuple[str, ...] = ()
    """Further nodes of which the same holds."""


class LoseNode(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    component: str
    reason: str


class Quarantine(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The node answers, but must be given no more work."""

    component: str
    reason: str


class Interrupt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The generation is broken: say so once, end all its workers."""

    loss: Loss
    reason: str
    wants_stacks: bool = False
    staying: tuple[int, ...] = ()
    """These ranks leave their step and wait in their processes; all others are ended."""


class EndStaying(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The ranks that were to stay do not leave their step, so all are started anew."""

    reason: str


class Place(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start the ranks here."""

    placement: tuple[Placed, ...]
    rung: Rung
    backoff_s: float
    reason: str
    staying: tuple[int, ...] = ()
    """Ranks that go on in their processes."""


class Grow(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Have all ranks save and leave, to start again with more nodes."""

    reason: str


class Regroup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All ranks have saved and left: see to it that nothing of them is left, and place anew."""

    reason: str


class ProbeNodes(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Pre-flight on these nodes, before any of them is given work."""

    components: tuple[str, ...]
    reason: str


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    reason: str


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    reason: str


class GiveUp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    reason: str


Decision = (
    Wait
    | RestartAgent
    | LoseNode
    | Quarantine
    | Interrupt
    | EndStaying
    | Place
    | ProbeNodes
    | Grow
    | Regroup
    | Finish
    | Stop
    | GiveUp
)

_SETTLE_S = 0.25
_NUM_SHOWN = 3
_NODE_IS_TO_BLAME: tuple[CauseClass, ...] = ("silent-corruption", "straggler")  # it is tested, or makes room
_DISK_WAIT = ": D is a wait in the kernel, for a device or a file system, that nothing can interrupt"
_ANSWER_S = 2.0  # an agent that has waited for its workers in vain says so; that takes a moment
_CAUSE_CLASS: dict[FindingKind, CauseClass] = {"stopped": "stopped", "hang": "hang", "unwound": "network"}


def decide(view: JobView, policy: Policy) -> Decision:
    """The next thing to do. Asked again after it was done."""
    node_decision = _about_nodes(view, policy)
    if node_decision is not None:
        return node_decision
    match view.status:
        case "running":
            return _while_running(view, policy)
        case "tearing-down":
            return _while_tearing_down(view, policy)
        case "gathering":
            return _while_gathering(view, policy)
        case "preflight":
            if view.is_stop_wanted:
                return Stop(reason="stop was asked for during the pre-flight")
            return Wait(reason="pre-flight")
        case "backing-off":
            if view.is_stop_wanted:
                return Stop(reason="stop was asked for while waiting to restart")
            if view.backoff_left_s > 0:
                return Wait(reason=f"back-off, {view.backoff_left_s:.1f} s left")
            return _place(view, policy, backoff_s=0.0)
        case "ended":
            return Wait(reason="the job has ended")


def first_loss(losses: Sequence[Loss]) -> Loss:
    """The one that took the others along: a signal before a broken collective, then the earliest."""
    return min(losses, key=lambda loss: (*loss.order, loss.rank))


def choose_placement(view: JobView, *, num_nodes: int | None = None) -> tuple[Placed, ...] | None:
    """Ranks stay where they are; those of a lost node go to a free one. None = not enough nodes.

    That is one which keeps a copy of the lost node's state, since then nothing must travel; else the next.

    A node takes part with all its `procs_per_node` ranks or with none. In a world of another size than before the ranks
    are counted anew, over the nodes that are left and then those that come.
    """
    count = view.num_nodes if num_nodes is None else num_nodes
    free = dict.fromkeys(usable_nodes(view))
    current: dict[int, str] = {placed.rank // view.procs_per_node: placed.component for placed in view.placement}
    if len(current) != count:
        left = [component for _, component in sorted(current.items()) if component in free]
        current = dict(enumerate(left[:count]))
    kept = {index: component for index, component in current.items() if component in free}
    for component in kept.values():
        del free[component]
    keepers = dict(view.keepers)
    for index, lost in current.items():
        at_hand = [name for name in keepers.get(lost, ()) if name in free]
        if index not in kept and at_hand:
            kept[index] = at_hand[0]
            del free[at_hand[0]]
    chosen: list[str] = []
    for index in range(count):
        if index in kept:
            chosen.append(kept[index])
        elif free:
            chosen.append(next(iter(free)))
            del free[chosen[-1]]
        else:
            return None
    return tuple(
        Placed(rank=index * view.procs_per_node + local, local_rank=local, component=component)
        for index, component in enumerate(chosen)
        for local in range(view.procs_per_node)
    )


def usable_nodes(view: JobView) -> list[str]:
    """The nodes that can be given work together now, in order of preference; of two cut off, the one in use stays."""
    there = [
        node.component
        for node in view.nodes
        if node.is_connected and node.is_ready and not node.is_lost and not node.is_quarantined
    ]
    if not view.cut_links:
        return there
    in_use = sorted(view.placement, key=lambda placed: placed.rank not in view.staying)
    preferred = dict.fromkeys(placed.component for placed in in_use if placed.component in there)
    preferred |= dict.fromkeys(there)
    together = reach_each_other(tuple(preferred), cut=view.cut_links)
    return [component for component in there if component in together]


def choose_size(view: JobView, policy: Policy) -> int:
    """With how many nodes to go on: all that are wanted, or, if some cannot be had, as many as there are.

    Less than `min_nodes` is not enough, and the number wanted is returned: there is nothing to do but wait.
    """
    usable = len(usable_nodes(view))
    if usable >= view.num_nodes or not 0 < view.min_nodes <= usable:
        return view.num_nodes
    may_come = not all(_is_settled(node) for node in view.nodes)
    return view.num_nodes if may_come and view.gathering_s <= policy.shrink_wait_s else usable


def _about_nodes(view: JobView, policy: Policy) -> Decision | None:
    if view.status == "ended":
        return None
    away = [node for node in view.nodes if not node.is_lost and not node.is_connected]
    if unasked := [node.component for node in away if not node.is_agent_asked]:
        return RestartAgent(component=unasked[0], others=tuple(unasked[1:]), reason="its agent is not there")
    for node in away:
        if node.silent_s > (policy.node_grace_s if node.was_connected else policy.join_s):
            return LoseNode(component=node.component, reason=f"no agent answers since {node.silent_s:.1f} s")
    return None


def _while_running(view: JobView, policy: Policy) -> Decision:
    lost_nodes = {node.component for node in view.nodes if node.is_lost}
    on_lost = [placed for placed in view.placement if placed.component in lost_nodes] if lost_nodes else []
    if on_lost:
        loss = Loss(rank=on_lost[0].rank, component=on_lost[0].component, cause_class="node", detail="the node is gone")
        reason = f"{on_lost[0].component} is gone with rank(s) {_ranks(on_lost)}"
        return Interrupt(loss=loss, reason=reason, staying=_who_stays(view, policy))
    if view.losses:
        loss = first_loss(view.losses)
        if loss.order[0] > 0 and view.loss_settle_s < _SETTLE_S:
            return Wait(reason="a collective broke; who broke it will be known in a moment")
        return Interrupt(loss=loss, reason=f"rank {loss.rank}: {loss.detail}", staying=_who_stays(view, policy))
    if view.finding is not None and not view.is_stop_complete:
        loss = _loss_of(view.finding, view.placement)
        culprit = () if view.finding.kind == "unwound" else (loss.rank,)
        return Interrupt(
            loss=loss,
            reason=view.finding.reason,
            wants_stacks=bool(culprit),
            staying=_who_stays(view, policy, but=culprit),
        )
    if view.is_stop_complete:
        return Stop(reason="stop was asked for; every rank has saved")
    if view.rung == "in-process" and not view.is_restored and view.running_s > policy.rejoin_s:
        placed = view.placement[0]
        detail = f"the recovery in the process did not finish within {policy.rejoin_s:g} s"
        loss = Loss(rank=placed.rank, component=placed.component, cause_class="software", detail=detail)
        return Interrupt(loss=loss, reason=detail)
    if view.has_left:  # nobody wants a stop: it was for a larger world, whoever asked for that
        return Regroup(reason="every rank has saved and left")
    if len(set(view.finished_ranks)) == len(view.placement):
        return Finish(reason="every rank ended well")
    if _can_grow(view, policy):
        free = _free(view)
        return Grow(reason=f"{', '.join(free)} can take part; the ranks save and start again with more nodes")
    return Wait(reason="running")


def _can_grow(view: JobView, policy: Policy) -> bool:
    return (
        view.is_attached
        and view.is_restored
        and not view.is_growing
        and not view.is_stop_wanted
        and not view.finished_ranks
        and (policy.max_restarts is None or view.num_restarts < policy.max_restarts)
        and len(view.placement) < view.num_nodes * view.procs_per_node
        and view.running_s > policy.grow_wait_s
        and bool(_free(view))
    )


def _free(view: JobView) -> list[str]:
    in_use = {placed.component for placed in view.placement}
    return [name for name in usable_nodes(view) if name not in in_use and name not in view.untested]


def _who_stays(view: JobView, policy: Policy, *, but: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The ranks that are well, if all of them can stay; nobody after a recovery that brought no new step.

    One that cannot stay builds a new group, which the others, in their old one, would wait for in vain.
    """
    if not policy.is_in_process or view.num_fruitless > 0 or view.is_stop_wanted or view.finished_ranks:
        return ()
    if view.give_up or any(loss.cause_class in _NODE_IS_TO_BLAME for loss in view.losses):
        return ()
    lost_nodes = {node.component for node in view.nodes if node.is_lost or node.is_quarantined}
    gone = {loss.rank for loss in view.losses} | set(but)
    well = [placed.rank for placed in view.placement if placed.rank not in gone and placed.component not in lost_nodes]
    return tuple(well) if set(well) <= set(view.can_stay) else ()


def _while_tearing_down(view: JobView, policy: Policy) -> Decision:
    in_use = {placed.component for placed in view.placement}
    ended = set(view.killed_nodes)
    unended = [
        node for node in view.nodes if node.component in in_use and not node.is_lost and node.component not in ended
    ]
    for node in unended:
        if node.undead and not node.is_quarantined:
            return Quarantine(
                component=node.component,
                reason=f"{node.undead} {policy.teardown_s:g} s after SIGKILL{_DISK_WAIT * ('state D' in node.undead)}",
            )
    waiting = {node.component for node in unended if not node.undead}
    if waiting and view.teardown_s > policy.teardown_s + _ANSWER_S:
        return LoseNode(component=min(waiting), reason=f"its workers did not die within {policy.teardown_s:g} s")
    if waiting:
        shown = ", ".join(sorted(waiting)[:_NUM_SHOWN])
        return Wait(reason=f"workers are being ended on {len(waiting)} nodes: {shown}")
    if view.is_probing:
        return Wait(reason="the nodes try whether they reach each other")
    if view.staying and (verdict := _about_staying(view, policy)) is not None:
        return verdict
    if view.is_stop_wanted:
        return Stop(reason="stop was asked for; a rank was lost meanwhile")
    if view.give_up:
        return GiveUp(reason=view.give_up)
    if policy.max_restarts is not None and view.num_restarts >= policy.max_restarts:
        return GiveUp(reason=f"all {policy.max_restarts} restarts are used (--max-restarts)")
    if view.num_fruitless >= policy.max_fruitless:
        return GiveUp(reason=f"{view.num_fruitless} failures in a row without one new step (the policy's limit)")
    # that it did not work in the process says nothing against the next rung
    num_fruitless = view.num_fruitless - (view.rung == "in-process")
    return _place(view, policy, backoff_s=backoff_s(num_fruitless, policy))


def _about_staying(view: JobView, policy: Policy) -> Decision | None:
    """None = they have all left their step."""
    if view.is_stop_wanted:
        return EndStaying(reason="stop was asked for; a rank was lost meanwhile")
    usable = usable_nodes(view)
    if any(placed.rank in view.staying and placed.component not in usable for placed in view.placement):
        return EndStaying(reason="another node was lost meanwhile, or cut off from the others")
    late = sorted(set(view.staying) - set(view.unwound))
    limit_s = max(policy.unwind_s, 2 * view.slow_step_s)
    if late and view.teardown_s > limit_s:
        return EndStaying(reason=f"rank(s) {', '.join(map(str, late))} did not leave the step within {limit_s:.1f} s")
    return Wait(reason="ranks are leaving the broken step") if late else None


def backoff_s(num_fruitless: int, policy: Policy) -> float:
    """Nothing after the first failure, then doubling. `num_fruitless` counts failures since the last new step."""
    if num_fruitless <= 1:
        return 0.0
    return min(policy.backoff_first_s * 2.0 ** (num_fruitless - 2), policy.backoff_max_s)


def _while_gathering(view: JobView, policy: Policy) -> Decision:
    if view.is_stop_wanted:
        return Stop(reason="stop was asked for before the job ran")
    return _place(view, policy, backoff_s=0.0)


def _place(view: JobView, policy: Policy, *, backoff_s: float) -> Decision:
    if view.status == "gathering" and not view.is_gathered and view.gathering_s < policy.gather_s:
        return Wait(reason="waiting for the chosen nodes")
    placement = choose_placement(view, num_nodes=choose_size(view, policy))
    if placement is None:
        is_hopeless = all(_is_settled(node) for node in view.nodes) and not view.cut_links
        if view.gathering_s > policy.spare_wait_s or is_hopeless:
            lost = [node.component for node in view.nodes if node.is_lost or node.is_quarantined]
            cut = "".join(f", {first} does not reach {second}" for first, second in view.cut_links)
            why = f"lost {', '.join(lost) or 'none'}{cut}, no spare left"
            return GiveUp(reason=f"not enough nodes: {view.num_nodes} needed, {why}")
        return Wait(reason="waiting for nodes")
    if (test := _test_first(view, placement, policy)) is not None:
        return test
    if view.generation == 0:
        return Place(placement=placement, rung="first", backoff_s=0.0, reason="all nodes are there")
    if len(placement) != len(view.placement):
        if view.staying:
            return EndStaying(reason="the world changes its size")
        before, after = (len(placed) // view.procs_per_node for placed in (view.placement, placement))
        reason = f"{after} of {view.num_nodes} nodes can be had, {before} took part before"
        return Place(placement=placement, rung="resized", backoff_s=backoff_s, reason=reason)
    if view.staying:
        new = [placed for placed in placement if placed.rank not in view.staying]
        reason = f"rank(s) {_ranks(new)} start again, the others stay" if new else "all ranks stay and connect anew"
        return Place(
            placement=placement, rung="in-process", backoff_s=0.0, reason=reason, staying=tuple(sorted(view.staying))
        )
    moved = [new for new, old in zip(placement, view.placement, strict=True) if new.component != old.component]
    if moved:
        return Place(
            placement=placement,
            rung="replaced-node",
            backoff_s=backoff_s,
            reason=f"rank(s) {_ranks(moved)} move to {', '.join(sorted({placed.component for placed in moved}))}",
        )
    if view.num_fruitless > 1 and view.rung != "in-process":
        reason = "all ranks start again, from fresh interpreters, since the start before brought no step"
        return Place(placement=placement, rung="cold", backoff_s=backoff_s, reason=reason)
    return Place(placement=placement, rung="standby", backoff_s=backoff_s, reason="all ranks start again from standbys")


def _is_settled(node: NodeView) -> bool:
    """Waiting will not bring it: it is there already, or gone for good as far as is known."""
    return node.is_connected if not node.is_lost else not node.is_expected


def _test_first(view: JobView, placement: Sequence[Placed], policy: Policy) -> ProbeNodes | Wait | None:
    """Before an untested node is given work, all untested ones are tested together, spares included."""
    if not {placed.component for placed in placement} & set(view.untested):
        return None
    coming = [
        node.component
        for node in view.nodes
        if node.component in view.untested and not (node.is_lost or node.is_quarantined or node.is_connected)
    ]
    if coming and view.gathering_s < policy.gather_s:
        return Wait(reason=f"waiting for {', '.join(coming)}, to be tested with the others")
    components = tuple(component for component in usable_nodes(view) if component in view.untested)
    return ProbeNodes(components=components, reason=f"{len(components)} node(s) to be tested before they are used")


def _loss_of(finding: Finding, placement: Sequence[Placed]) -> Loss:
    component = next(placed.component for placed in placement if placed.rank == finding.rank)
    cause_class = _CAUSE_CLASS[finding.kind]
    return Loss(rank=finding.rank, component=component, cause_class=cause_class, detail=finding.reason)


def _ranks(placed: Sequence[Placed]) -> str:
    return ", ".join(str(item.rank) for item in placed)
