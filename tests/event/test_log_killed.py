"""The promise of the log: what was acknowledged is there, once, whenever the writer is killed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

import dougong.event
from dougong.clock import SystemClock
from dougong.event.kinds import WarningRaised
from dougong.event.log import EventLog
from dougong.event.store import read

NUM_KILLS = 200
WRITER = Path(__file__).with_name("writer_process.py")
SOURCE = Path(dougong.event.__file__).parents[2]


@pytest.mark.processes
def test_after_200_kills_every_acknowledged_event_is_there_once_and_the_log_goes_on(tmp_path: Path) -> None:
    directory, chance = tmp_path / "events", random.Random(20260714)
    acknowledged = {life: killed_writer(directory, life=life, chance=chance) for life in range(NUM_KILLS)}

    with EventLog.open(directory, stream="run", clock=SystemClock()) as log:
        log.append(WarningRaised(component="after", text="1"))
    records = list(read(directory))
    assert [record.seq for record in records] == list(range(1, len(records) + 1))
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for record in records:
        assert isinstance(record.event, WarningRaised)
        numbers[record.event.component].append(int(record.event.text.split()[0]))
    assert numbers["after"] == [1]
    for life, last in acknowledged.items():
        found = numbers[str(life)]
        assert found == list(range(1, len(found) + 1)), "in order, none twice, no hole"
        assert len(found) >= last


def killed_writer(directory: Path, *, life: int, chance: random.Random) -> int:
    """Start a writer, kill it at a random moment; the last number it acknowledged."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, str(WRITER), str(directory), str(life)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as writer:
        assert writer.stdout is not None
        acks = [int(writer.stdout.readline()) for _ in range(chance.randrange(1, 12))]
        time.sleep(chance.random() * 0.003)  # anywhere inside the next commits
        writer.kill()
        acks += [int(line) for line in writer.stdout.read().splitlines(keepends=True) if line.endswith(b"\n")]
    assert writer.returncode == -9
    return max(acks)
