"""Nodes that come by themselves: one launcher on each host starts its own agent, under Slurm's `srun` or by hand.

Nothing can be started from outside, so a node that went silent is waited for, and then counts as lost.
"""

from __future__ import annotations


class JoinedNodes:
    """The node backend of a run whose members were started by another engine."""

    def start_agent(self, component: str) -> None:
        """Its own launcher starts it again."""

    def fence(self, component: str) -> None:
        """Nothing of it can be reached; its agent is told to leave if it ever comes back."""

    def end_agent(self, component: str) -> None:
        """Its own launcher ends it."""

    def can_return(self, component: str) -> bool:
        """Its own launcher starts its agent again; whether it comes will be seen."""
        return True
