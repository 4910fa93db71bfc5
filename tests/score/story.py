"""A small language for the events of a job: `Story` writes them at simulated seconds."""

from __future__ import annotations

from dougong.event import kinds
from dougong.event.kinds import Cause, Recorded

NS = 1_000_000_000


class Story:
    """Events of one stream; every method writes one at `at_s`."""

    def __init__(self, *, num_nodes: int = 2) -> None:
        self.records: list[Recorded] = []
        self.nodes = tuple(f"hall/rack-01/node-{index:02d}" for index in range(1, num_nodes + 1))

    def write(self, at_s: float, event: kinds.AnyEvent | kinds.Unknown, *, cause: Cause | None = None) -> Recorded:
        recorded = Recorded(
            stream="controller", seq=len(self.records) + 1, time_ns=round(at_s * NS), event=event, cause=cause
        )
        self.records.append(recorded)
        return recorded

    def created(self, at_s: float) -> None:
        self.write(
            at_s,
            kinds.JobCreated(
                job="gpt",
                version="0",
                command=("train.py",),
                backend="local",
                world_size=len(self.nodes),
                num_accelerators=len(self.nodes),
                nodes=self.nodes,
            ),
        )

    def started(self, at_s: float, *, is_resume: bool = False) -> None:
        self.write(at_s, kinds.JobStarted(job="gpt", is_resume=is_resume))

    def generation(self, at_s: float, number: int) -> None:
        self.write(at_s, kinds.GenerationStarted(generation=number, placement=(), rung="cold", reason=""))

    def restored(self, at_s: float, number: int, *, step: int = 0, reload_s: float = 0.0) -> None:
        self.write(
            at_s, kinds.StateRestored(generation=number, step=step, source="memory", reload_s=reload_s, reason="")
        )

    def steps(
        self,
        at_s: float,
        number: int,
        first: int,
        last: int,
        *,
        begin_s: float,
        end_s: float,
        is_redo: bool = False,
        between_s: float = 0.0,
        stall_s: float = 0.0,
        wait_s: float = 0.0,
        tokens: int | None = None,
    ) -> None:
        self.write(
            at_s,
            kinds.StepFinished(
                generation=number,
                first_step=first,
                last_step=last,
                begin_ns=round(begin_s * NS),
                end_ns=round(end_s * NS),
                is_redo=is_redo,
                step_s=end_s - begin_s - between_s,
                between_s=between_s,
                data_wait_s=wait_s,
                checkpoint_stall_s=stall_s,
                max_step_s=(end_s - begin_s) / (last - first + 1),
                tokens=tokens,
            ),
        )

    def range(
        self,
        at_s: float,
        first: int,
        last: int,
        *,
        begin_s: float,
        end_s: float,
        step_s: float,
        between_s: float = 0.0,
        stall_s: float = 0.0,
        wait_s: float = 0.0,
    ) -> None:
        """A range of the first generation whose parts are told one by one."""
        self.write(
            at_s,
            kinds.StepFinished(
                generation=1,
                first_step=first,
                last_step=last,
                begin_ns=round(begin_s * NS),
                end_ns=round(end_s * NS),
                is_redo=False,
                step_s=step_s,
                between_s=between_s,
                data_wait_s=wait_s,
                checkpoint_stall_s=stall_s,
                max_step_s=step_s,
            ),
        )

    def fault(self, at_s: float, *, rank: int | None = 1, component: str | None = None) -> Recorded:
        return self.write(at_s, kinds.FaultInjected(fault="kill", component=component or self.nodes[1], rank=rank))

    def lost(
        self, at_s: float, number: int, *, rank: int = 1, onset_s: float | None = None, cause: Cause | None = None
    ) -> None:
        self.write(
            at_s,
            kinds.WorkerLost(
                generation=number,
                rank=rank,
                component=self.nodes[rank],
                cause_class="crash",
                detail="signal 9",
                onset_ns=None if onset_s is None else round(onset_s * NS),
            ),
            cause=cause,
        )

    def decided(self, at_s: float, number: int) -> None:
        self.write(
            at_s,
            kinds.RecoveryDecided(
                generation=number, rung="cold", restore_step=0, restore_source="memory", backoff_s=0.0, reason=""
            ),
        )

    def resumed(self, at_s: float, number: int, *, step: int) -> None:
        self.write(at_s, kinds.JobResumed(generation=number, step=step))


def one_interruption() -> Story:
    """Ten steps of 1 s, a crash at 16 s found at 17 s, decided at 17.5 s, started at 19 s, reloaded for 1 s until
    21 s, three steps again from 22 s, then five more, the end at 31 s."""
    story = Story()
    story.created(0)
    story.started(0)
    story.generation(1, 1)
    story.restored(4, 1)
    story.steps(15, 1, 1, 10, begin_s=5, end_s=15, tokens=100)
    story.fault(16)
    story.lost(17, 1)
    story.decided(17.5, 1)
    story.generation(19, 2)
    story.restored(21, 2, step=7, reload_s=1)
    story.steps(25, 2, 8, 10, begin_s=22, end_s=25, is_redo=True, tokens=30)
    story.resumed(25, 2, step=8)
    story.steps(30, 2, 11, 15, begin_s=25, end_s=30, tokens=50)
    story.write(31, kinds.JobFinished(step=15))
    return story
