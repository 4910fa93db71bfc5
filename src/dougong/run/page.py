"""The heartbeat page: what a worker tells its agent without a call, and what the agent tells its worker.

One file in shared memory per rank. The worker writes fixed fields and a ring of finished steps, the agent polls them;
a few control fields go the other way. Every field is one aligned 8-byte word, so a reader never sees half of one. A new
file is made for each start of a rank, so that a process left over from an earlier generation writes into nothing.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
from pathlib import Path

import msgspec

_MAGIC = 0x32304750474E4744  # "DGNGPG02"
_HEADER_BYTES = 4096
_RECORD = struct.Struct("<QQQQdqQQQ")  # step, begin, end, data_wait, loss, tokens, stall, between, compute
_RING_LENGTH = 960
_PAGE_BYTES = _HEADER_BYTES + _RING_LENGTH * _RECORD.size
NO_STEP = 0  # steps are counted from 1; 0 = none finished


class Phase(enum.IntEnum):
    """What the worker is doing. Each has its own patience in the hang rule."""

    STARTING = 0  # imports, model, data: until the first step begins
    STEP = 1  # inside a step
    BETWEEN = 2  # between two steps: evaluation, the script's own save, logging
    CHECKPOINT = 3  # inside a checkpoint of ours
    RESTORING = 4
    UNWOUND = 5  # a collective broke; the rank has left the step and waits for the verdict
    STOPPED_CLEAN = 6  # has saved at the wanted step and is leaving
    DONE = 7
    COMPILE = 8  # `with job.compiling():`
    EVALUATION = 9  # `with job.evaluating():`


class ControlFault(enum.IntEnum):
    """A fault that a worker does to itself when a chaos schedule asks for it."""

    NONE = 0
    HANG = 1  # takes a lock that is never released
    RAISE = 2  # raises an exception in the user's code
    FLIP = 3  # flips one bit of a parameter


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """One finished step of one rank; times are monotonic nanoseconds of its host."""

    step: int
    begin_ns: int
    end_ns: int
    data_wait_ns: int
    loss: float | None
    tokens: int | None
    checkpoint_stall_ns: int
    between_ns: int
    compute_ns: int = 0
    """From the begin until the first collective was entered; 0 = not measured."""


class SaveOrder(msgspec.Struct, frozen=True):
    """Save after every so many steps, for the steps from `from_step` on."""

    from_step: int
    memory_every_steps: int
    durable_every_steps: int


class SaveTimes:
    """When a rank saves. A rhythm holds until the next one begins."""

    def __init__(self, *, memory_every_steps: int, durable_every_steps: int) -> None:
        self.memory_every_steps = memory_every_steps
        self.durable_every_steps = durable_every_steps

    def take(self, order: SaveOrder | None, *, step: int | None) -> None:
        """Go over to `order` once `step` has reached its begin; at once if `step` is None, after a roll-back."""
        if order is not None and (step is None or step >= order.from_step):
            self.memory_every_steps = order.memory_every_steps
            self.durable_every_steps = order.durable_every_steps

    def is_durable(self, step: int) -> bool:
        return step % self.durable_every_steps == 0

    def is_due(self, step: int) -> bool:
        """In memory, at least."""
        return step % self.memory_every_steps == 0 or self.is_durable(step)


_ORDER_BITS = (28, 14, 22)  # of the three numbers of a SaveOrder


class _Field(enum.IntEnum):
    MAGIC = 0
    GENERATION = 1
    PID = 2
    PHASE = 3
    PHASE_SINCE_NS = 4
    STEP = 5
    PROGRESS_NS = 6
    RING_COUNT = 7
    IS_ATTACHED = 8
    RESTORED_STEP = 9
    CAN_STAY = 10
    STOP_AT_STEP = 16  # written by the agent from here on
    CONTROL_FAULT = 17
    SAVE_RHYTHM = 18  # one word, so that its three numbers are never of two rhythms; 20 to 25 are others'
    CUT_GENERATION = 20
    SAVES_HELD_UNTIL_STEP = 24
    FLIGHT_ASKED = 25


class Page:
    """A mapped heartbeat page."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._map = mapping
        self._words = memoryview(mapping)[:_HEADER_BYTES].cast("Q")

    @classmethod
    def create(cls, path: Path, *, generation: int) -> Page:
        """Make a new page in place of whatever stands at `path`."""
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(fd, 0, _PAGE_BYTES)
            page = cls(mmap.mmap(fd, _PAGE_BYTES))
        finally:
            os.close(fd)
        page._words[_Field.GENERATION] = generation
        page._words[_Field.MAGIC] = _MAGIC
        return page

    @classmethod
    def open(cls, path: Path) -> Page:
        """Map an existing page. Raises FileNotFoundError; ValueError if it is not a page."""
        fd = os.open(path, os.O_RDWR)
        try:
            if os.fstat(fd).st_size != _PAGE_BYTES:
                raise ValueError(f"{path} is not a heartbeat page of this version")
            page = cls(mmap.mmap(fd, _PAGE_BYTES))
        finally:
            os.close(fd)
        if page._words[_Field.MAGIC] != _MAGIC:
            raise ValueError(f"{path} is not a heartbeat page of this version")
        return page

    def close(self) -> None:
        self._words.release()
        self._map.close()

    # --- written by the worker ---

    def begin(self, *, pid: int, now_ns: int) -> None:
        """The worker has started."""
        self._words[_Field.PID] = pid
        self.enter(Phase.STARTING, now_ns=now_ns)
        self._words[_Field.PROGRESS_NS] = now_ns

    def enter(self, phase: Phase, *, now_ns: int) -> None:
        self._words[_Field.PHASE_SINCE_NS] = now_ns
        self._words[_Field.PHASE] = phase

    def mark_attached(self) -> None:
        self._words[_Field.IS_ATTACHED] = 1

    def mark_can_stay(self, *, can_stay: bool) -> None:
        """Can this rank go on in its process when a peer is replaced?"""
        self._words[_Field.CAN_STAY] = can_stay

    def mark_restored(self, *, step: int) -> None:
        self._words[_Field.RESTORED_STEP] = step
        self._words[_Field.STEP] = step

    def finish_step(self, record: StepRecord) -> None:
        """Put a finished step into the ring and count it as progress."""
        count = self._words[_Field.RING_COUNT]
        offset = _HEADER_BYTES + (count % _RING_LENGTH) * _RECORD.size
        _RECORD.pack_into(
            self._map,
            offset,
            record.step,
            record.begin_ns,
            record.end_ns,
            record.data_wait_ns,
            float("nan") if record.loss is None else record.loss,
            -1 if record.tokens is None else record.tokens,
            record.checkpoint_stall_ns | (1 << 63 if record.loss is None else 0),
            record.between_ns,
            record.compute_ns,
        )
        self._words[_Field.RING_COUNT] = count + 1
        self._words[_Field.STEP] = record.step
        self._words[_Field.PROGRESS_NS] = record.end_ns

    # --- read by the agent ---

    @property
    def generation(self) -> int:
        return self._words[_Field.GENERATION]

    @property
    def pid(self) -> int:
        return self._words[_Field.PID]

    @property
    def phase(self) -> Phase:
        return Phase(self._words[_Field.PHASE])

    @property
    def phase_since_ns(self) -> int:
        return self._words[_Field.PHASE_SINCE_NS]

    @property
    def step(self) -> int:
        return self._words[_Field.STEP]

    @property
    def progress_ns(self) -> int:
        """When the worker last gave a sign: a step or a change of phase."""
        return max(self._words[_Field.PROGRESS_NS], self._words[_Field.PHASE_SINCE_NS])

    @property
    def is_attached(self) -> bool:
        return bool(self._words[_Field.IS_ATTACHED])

    @property
    def can_stay(self) -> bool:
        return bool(self._words[_Field.CAN_STAY])

    def drain(self, *, seen: int) -> tuple[tuple[StepRecord, ...], int]:
        """The steps finished since the first `seen` ones, and the new count. Overwritten ones are lost."""
        count = self._words[_Field.RING_COUNT]
        first = max(seen, count - _RING_LENGTH + 1)
        return tuple(self._record(index) for index in range(first, count)), count

    # --- control, written by the agent ---

    @property
    def stop_at_step(self) -> int:
        """Save and leave once this step is finished; 0 = go on."""
        return self._words[_Field.STOP_AT_STEP]

    @stop_at_step.setter
    def stop_at_step(self, step: int) -> None:
        self._words[_Field.STOP_AT_STEP] = step

    @property
    def save_order(self) -> SaveOrder | None:
        """None = none was given since the start."""
        word = self._words[_Field.SAVE_RHYTHM]
        if not word:
            return None
        numbers: list[int] = []
        for bits in reversed(_ORDER_BITS):
            numbers.append(word & ((1 << bits) - 1))
            word >>= bits
        return SaveOrder(*reversed(numbers))

    @save_order.setter
    def save_order(self, order: SaveOrder) -> None:
        word = 0
        for number, bits in zip(msgspec.structs.astuple(order), _ORDER_BITS, strict=True):
            word = (word << bits) | min(number, (1 << bits) - 1)
        self._words[_Field.SAVE_RHYTHM] = word

    @property
    def saves_held_until_step(self) -> int:
        """No checkpoint may be taken up to this step; 0 = none is held back."""
        return self._words[_Field.SAVES_HELD_UNTIL_STEP]

    def hold_saves(self, *, until_step: int) -> None:
        self._words[_Field.SAVES_HELD_UNTIL_STEP] = max(self.saves_held_until_step, until_step)

    @property
    def flights_asked(self) -> int:
        """How often the rank was asked for its record of collectives."""
        return self._words[_Field.FLIGHT_ASKED]

    def ask_flight(self) -> None:
        self._words[_Field.FLIGHT_ASKED] = self.flights_asked + 1

    def join_generation(self, generation: int) -> int:
        """The rank goes on in a new generation; how many records its ring has seen so far. It is told by a letter."""
        self._words[_Field.GENERATION] = generation
        self._words[_Field.SAVES_HELD_UNTIL_STEP] = 0
        self.stop_at_step = 0
        return self._words[_Field.RING_COUNT]

    @property
    def cut_generation(self) -> int:
        """Leave the collectives of generations up to this one: a peer is lost. 0 = none."""
        return self._words[_Field.CUT_GENERATION]

    @cut_generation.setter
    def cut_generation(self, generation: int) -> None:
        self._words[_Field.CUT_GENERATION] = generation

    def ask_fault(self, fault: ControlFault) -> None:
        self._words[_Field.CONTROL_FAULT] = fault

    def take_fault(self) -> ControlFault:
        """The fault asked for, once."""
        fault = ControlFault(self._words[_Field.CONTROL_FAULT])
        if fault is not ControlFault.NONE:
            self._words[_Field.CONTROL_FAULT] = ControlFault.NONE
        return fault

    def _record(self, index: int) -> StepRecord:
        offset = _HEADER_BYTES + (index % _RING_LENGTH) * _RECORD.size
        step, begin, end, wait, loss, tokens, stall, between, compute = _RECORD.unpack_from(self._map, offset)
        return StepRecord(
            step=step,
            begin_ns=begin,
            end_ns=end,
            data_wait_ns=wait,
            loss=None if stall >> 63 else loss,
            tokens=None if tokens < 0 else tokens,
            checkpoint_stall_ns=stall & ~(1 << 63),
            between_ns=between,
            compute_ns=compute,
        )
