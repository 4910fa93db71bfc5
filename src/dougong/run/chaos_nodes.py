"""Faults of nodes and of the control plane: killed, returned, cut off, with a clock that jumps, pre-empted."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable

from dougong.event.kinds import Placed
from dougong.run.chaos_workers import Reach, Undo
from dougong.spec.chaos import CONTROLLER, EVERYTHING, Fault


class NodeFaults:
    """Harms nodes through the door of their backend."""

    def __init__(self, reach: Reach, *, placement: Callable[[], tuple[Placed, ...]], drawn: random.Random) -> None:
        self._reach = reach
        self._placement = placement
        self._drawn = drawn

    def do(self, fault: Fault) -> tuple[str, str]:
        """Do it; the component harmed, and what was done in words."""
        match fault.kind:
            case "kill-node":
                component = self._node(fault)
                self._reach.door.kill_node(component)
                return component, "agent, workers and memory are gone"
            case "return-node":
                return self._return(fault)
            case "kill-agent":
                component = self._node(fault)
                self._reach.door.kill_agent(component)
                return component, "the agent alone"
            case "kill-controller":
                self._reach.kill_controller()
                return CONTROLLER, "SIGKILL"
            case "kill-agent-and-controller":
                component = self._node(fault)
                self._reach.kill_controller()
                self._reach.door.kill_agent(component)
                return component, "SIGKILL to the controller and to this agent"
            case "kill-launcher":
                self._reach.signal_launcher(signal.SIGKILL)
                return "launcher", "SIGKILL"
            case "sigterm-launcher":
                self._reach.signal_launcher(signal.SIGTERM)
                return "launcher", "SIGTERM"
            case "jump-clock":
                return self._jump(fault)
            case _:
                raise AssertionError(fault.kind)

    def cut(self, fault: Fault) -> tuple[str, str, Undo]:
        """Packets between a node and its peer vanish."""
        component, peer = self._node(fault), fault.peer or EVERYTHING
        if peer == component:
            peer = next(placed.component for placed in self._placement() if placed.component != component)
        self._reach.door.cut(component, peer)
        return component, f"its packets to and from {peer} are lost", lambda: self._reach.door.heal(component, peer)

    def preempt(self, fault: Fault) -> tuple[str, str]:
        """A scheduler takes the machine away: SIGTERM to all now, and to what is left after the grace SIGKILL."""
        assert fault.grace_s is not None
        timer = threading.Timer(fault.grace_s, self._reach.signal_run, (signal.SIGKILL,))
        timer.daemon = True
        timer.start()
        self._reach.signal_run(signal.SIGTERM)
        return "launcher", f"SIGTERM to every process, SIGKILL after {fault.grace_s:g} s"

    def _return(self, fault: Fault) -> tuple[str, str]:
        killed = self._reach.door.killed_nodes()
        component = fault.node or (killed[0] if killed else None)
        if component is None or component not in killed:
            raise LookupError("no node was killed" if component is None else f"{component} was not killed")
        self._reach.door.return_node(component)
        return component, "it can be reached again, with nothing on it"

    def _jump(self, fault: Fault) -> tuple[str, str]:
        assert fault.jump_s is not None
        everywhere = (CONTROLLER, *sorted({placed.component for placed in self._placement()}))
        for component in everywhere if fault.node is None else (fault.node,):
            self._reach.door.jump_clock(component, jump_s=fault.jump_s)
        return fault.node or EVERYTHING, f"the wall clock jumps by {fault.jump_s:+g} s"

    def _node(self, fault: Fault) -> str:
        """The node named, or, if it is no longer in use, the one that took its place in the schedule's draw."""
        in_use = sorted({placed.component for placed in self._placement()})
        return fault.node if fault.node in in_use else self._drawn.choice(in_use)
