"""Ranks copy and persist at different speeds. Whenever one is killed, all must still hold one state in common."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from dougong.run.snapshot import SnapshotFiles


class Rank:
    """Does what `dougong.run.attach` does between steps, one act at a time; a copy ends when it is told to."""

    def __init__(self, prefix: Path, *, every: int, durable_every: int) -> None:
        self.files = SnapshotFiles(prefix)
        self.step = 0
        self.copying: tuple[int, int] | None = None
        self.pinned_step = 0
        self._expected_save = 0
        self._every = every
        self._durable_every = durable_every

    @property
    def held(self) -> set[int]:
        return {slot.step for slot in self.files.slots()}

    def is_due(self, step: int) -> bool:
        return step % self._every == 0 or step % self._durable_every == 0

    def end_copy(self) -> None:
        if self.copying is None:
            return
        index, step = self.copying
        self.files.publish(index, step=step, generation=1, world_size=2, num_bytes=1)
        self.copying = None
        if step % self._durable_every == 0 and not self.pinned_step:
            self.files.pin(index)
            self.pinned_step = step

    def end_persist(self) -> None:
        if self.pinned_step:
            self.files.pin(None)
            self.pinned_step = 0

    def finish_step(self) -> None:
        """The optimizer's fence is left out: it only makes a rank that copies slower, never faster."""
        self.step += 1
        if self.is_due(self.step):
            self.end_copy()
            index = self.files.next_index(num_kept=1 if self._expected_save == self.step else 2)
            self.files.reserve(1, only=index)
            self.files.void(index)
            self.copying = (index, self.step)
        elif self.is_due(self.step + 1):
            self.end_copy()
            self._expected_save = self.step + 1


@settings(max_examples=150, deadline=None)
@given(
    every=st.integers(1, 4),
    durable_every=st.integers(1, 9),
    acts=st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["step", "step", "copied", "persisted"])), min_size=20),
)
def test_all_ranks_hold_one_state_in_common_at_every_moment(
    every: int, durable_every: int, acts: list[tuple[int, str]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        ranks = [Rank(Path(directory) / f"rank-{n}", every=every, durable_every=durable_every) for n in (0, 1)]
        is_begun = False
        for number, act in acts:
            rank, other = ranks[number], ranks[1 - number]
            if act == "copied":
                rank.end_copy()
            elif act == "persisted":
                rank.end_persist()
            elif (
                rank.step <= other.step
            ):  # its gradients are added up with those of the other, which has begun that step
                rank.finish_step()
            common = ranks[0].held & ranks[1].held
            assert common or not is_begun, (ranks[0].held, ranks[1].held)
            is_begun = is_begun or bool(common)
