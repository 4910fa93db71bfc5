"""A real writer, made to be killed: appends, commits, and only then says on stdout what is acknowledged.

`python writer_process.py DIRECTORY LIFE`: each line of stdout is `<last acknowledged number of this life>`.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from dougong.clock import SystemClock
from dougong.event.kinds import WarningRaised
from dougong.event.log import EventLog


def main() -> None:
    directory, life = Path(sys.argv[1]), sys.argv[2]
    random_of_life = random.Random(int(life))
    number = 0
    with EventLog.open(directory, stream="run", clock=SystemClock(), segment_max_bytes=1 << 18) as log:
        os.write(1, b"0\n")
        while True:
            for _ in range(random_of_life.choice((1, 1, 3, 20))):
                number += 1
                padding = "x" * random_of_life.choice((0, 10, 5000))
                log.append(WarningRaised(component=life, text=f"{number} {padding}"))
            log.commit()
            os.write(1, b"%d\n" % number)


if __name__ == "__main__":
    main()
