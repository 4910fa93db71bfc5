"""A thread in the worker that acts on what the agent asks while the training thread waits in a collective."""

from __future__ import annotations

import threading
import time

from dougong.run.group import default_group
from dougong.run.page import Page

_POLL_S = 0.02


class Watch:
    """Cuts the connections of the default group once its generation is told to leave."""

    def __init__(self, page: Page, *, generation: int) -> None:
        self._page = page
        self._generation = generation
        self._thread = threading.Thread(target=self._work, name="dougong-watch", daemon=True)
        self._thread.start()

    def move_to(self, generation: int) -> None:
        """The rank belongs to a new generation."""
        self._generation = generation

    def _work(self) -> None:
        last_cut = 0
        while True:
            wanted = self._page.cut_generation
            if wanted >= self._generation and wanted != last_cut:
                group = default_group()
                # one that is only being formed is cut once it is there
                if group is None or group.cut():
                    last_cut = wanted
            time.sleep(_POLL_S)
