"""The courier of one node, started by its agent: `python -m dougong.run.courier RUN_DIR COMPONENT`.

It copies memory checkpoints, once they are whole, twice: into memory of its own, where the rank does not write over it,
and from there to the couriers of other nodes, and keeps theirs. After a loss it gives them back. A process of its own
without PyTorch, so that neither the ranks nor the agent's quick loop ever wait for a copy. It ends with its agent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

import msgspec

from dougong.errors import CheckpointDamaged, DougongError
from dougong.run import courier_wire, wire
from dougong.run.copy_store import NO_ANCHOR, Anchor, CopyStore, Found, copy_over
from dougong.run.courier_orders import Bring, Brought, CourierMessage, CourierOrder, Report
from dougong.run.layout import NodeDirectory, node_directory
from dougong.run.settings import RunSettings, load_settings, run_directory
from dougong.run.snapshot import Slot

_POLL_S = 0.005
_NICENESS = 10


class Courier:
    """Serves the couriers of other nodes, and carries out what its agent orders."""

    def __init__(self, component: str, *, node: NodeDirectory, settings: RunSettings, token: bytes) -> None:
        self._component = component
        self._settings = settings
        self._token = token
        self._store = CopyStore(node)
        self._order: wire.CopyOrder | None = None
        self._has_new_order = threading.Event()
        self._speaking = threading.Lock()
        host = settings.node_host
        self._server = socket.create_server((host, 0), backlog=64)
        self._port: int = self._server.getsockname()[1]

    def run(self) -> None:
        """Until the agent closes stdin."""
        threading.Thread(target=self._serve, name="serve", daemon=True).start()
        threading.Thread(target=self._copy, name="copy", daemon=True).start()
        self._report()
        for line in sys.stdin.buffer:
            match msgspec.json.decode(line, type=CourierOrder):
                case wire.CopyOrder() as order:
                    self._order = order
                    self._has_new_order.set()
                    if self._store.forget_before(self._anchor):
                        self._report()
                case Bring() as bring:
                    threading.Thread(target=self._bring, args=(bring,), name="bring", daemon=True).start()

    # --- making copies ---

    def _copy(self) -> None:
        """One round after the other; it never comes before the ranks' own work."""
        _be_nice()
        round_: _Round | None = None
        while True:
            order = self._order
            if order is not None and (round_ is None or not round_.is_of(order)):
                round_ = _Round(order)
            is_done = round_ is None or round_.is_done(self._settings.procs_per_node)
            if round_ is None or is_done or not self._advance(round_):
                self._has_new_order.wait(None if is_done else _POLL_S)
                self._has_new_order.clear()

    def _advance(self, round_: _Round) -> bool:
        """Keep what the ranks have saved since, else send one copy. Was there anything to do?"""
        order = round_.order
        found = self._store.newest_of_own(generation=order.generation, from_step=order.from_step)
        fresh = [state for state in found if state.rank not in round_.seen and state.slot not in round_.bad]
        for state in fresh:
            self._keep(state, round_)
        if fresh or not round_.to_send:
            return bool(fresh)
        self._send(round_.to_send.pop(0), round_)
        return True

    def _keep(self, state: Found, round_: _Round) -> None:
        slot = state.slot
        try:
            if not self._store.has(self._component, state.rank, slot):
                with self._store.deposit(self._component, state.rank, slot, anchor=self._anchor) as deposit:
                    copy_over(state, deposit)
        except DougongError:
            # the rank wrote over it meanwhile, or it is damaged; a later one will do, if all ranks take the same
            round_.bad.add(slot)
            return
        except OSError as error:
            round_.give_up(state.rank)
            self._report(f"rank {state.rank}, step {slot.step}: {error.strerror}")
            return
        kept = self._store.find(state.rank, generation=slot.generation, step=slot.step, owner=self._component)
        if kept is not None:
            round_.keep(kept)
        self._report()

    def _send(self, kept: Found, round_: _Round) -> None:
        problems: list[str] = []
        for peer in round_.order.peers:
            try:
                self._send_to(peer, kept)
            except (DougongError, OSError) as error:
                problems.append(f"rank {kept.rank}, step {kept.slot.step} to {peer.component}: {error}")
        if problems:
            self._report("; ".join(problems))

    def _send_to(self, peer: wire.CourierAddress, kept: Found) -> None:
        with courier_wire.call(peer.host, peer.port, token=self._token) as connection:
            connection.say(courier_wire.Put(owner=self._component, rank=kept.rank, slot=kept.slot, anchor=self._anchor))
            if connection.is_wanted():
                pace = courier_wire.Pace(self._settings.save.peer_max_bytes_per_s)
                if not connection.give(kept, pace=pace):
                    self._store.drop(kept)
                connection.expect(courier_wire.Kept)

    # --- serving others ---

    def _serve(self) -> None:
        while True:
            sock, _ = self._server.accept()
            threading.Thread(target=self._answer, args=(sock,), name="answer", daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        try:
            with courier_wire.answer(sock, token=self._token) as connection:
                match connection.hear():
                    case courier_wire.Put() as put:
                        self._take_in(put, connection)
                    case courier_wire.Get() as get:
                        self._give_out(get, connection)
                    case other:
                        connection.say(courier_wire.Refused(reason=f"{type(other).__name__} is no request"))
        except (DougongError, OSError):
            return  # the other side sees the same, and what was half done does not exist

    def _take_in(self, put: courier_wire.Put, connection: courier_wire.CourierConnection) -> None:
        if put.owner.startswith("."):
            connection.say(courier_wire.Refused(reason=f"{put.owner!r} is no component"))
            return
        if self._store.has(put.owner, put.rank, put.slot):
            connection.say(courier_wire.Kept())
            return
        _be_nice()
        try:
            # the news of a finished round may have reached the sender first
            anchor = max(self._anchor, put.anchor)
            with self._store.deposit(put.owner, put.rank, put.slot, anchor=anchor) as deposit:
                connection.say(courier_wire.Ready())
                connection.take(deposit)
            connection.say(courier_wire.Kept())
        except (CheckpointDamaged, OSError) as error:
            connection.say(courier_wire.Refused(reason=str(error)))
        finally:
            self._report()

    def _give_out(self, get: courier_wire.Get, connection: courier_wire.CourierConnection) -> None:
        found = self._store.find(get.rank, generation=get.generation, step=get.step)
        if found is None:
            connection.say(courier_wire.Refused(reason=f"step {get.step} of rank {get.rank} is not here any more"))
            return
        connection.say(courier_wire.Offer(slot=found.slot))
        if not connection.give(found, pace=courier_wire.Pace(0.0)) and found.owner:
            self._store.drop(found)
            self._report()

    # --- bringing a state back ---

    def _bring(self, bring: Bring) -> None:
        reason = ""
        try:
            self._bring_home(bring)
        except (DougongError, OSError) as error:
            reason = str(error)
        self._say(Brought(request=bring.request, reason=reason))

    def _bring_home(self, bring: Bring) -> None:
        """What lies on this node is only compared with its checksum: the rank reads it where it is."""
        while (here := self._store.find(bring.rank, generation=bring.generation, step=bring.step)) is not None:
            if here.is_whole():
                return
            self._store.drop(here)
            self._report()
        if bring.origin.component == self._component:
            raise CheckpointDamaged(f"the copy of step {bring.step}", reason="checksum differs (xxh3-128)")
        with courier_wire.call(bring.origin.host, bring.origin.port, token=self._token) as connection:
            connection.say(courier_wire.Get(rank=bring.rank, generation=bring.generation, step=bring.step))
            slot = connection.expect(courier_wire.Offer).slot
            with self._store.deposit_own(bring.rank, slot) as deposit:
                connection.take(deposit)

    # --- speaking with the agent ---

    @property
    def _anchor(self) -> Anchor:
        order = self._order
        return NO_ANCHOR if order is None else Anchor(order.anchor_generation, order.anchor_step)

    def _report(self, problem: str = "") -> None:
        with self._speaking:
            _write(Report(port=self._port, copies=self._store.held(), problem=problem))

    def _say(self, message: CourierMessage) -> None:
        with self._speaking:
            _write(message)


class _Round:
    """How far one round of copies is on this node."""

    def __init__(self, order: wire.CopyOrder) -> None:
        self.order = order
        self.seen: set[int] = set()
        self.bad: set[Slot] = set()
        self.to_send: list[Found] = []

    def is_of(self, order: wire.CopyOrder) -> bool:
        """A controller that was started anew counts rounds anew."""
        own = self.order
        return (own.generation, own.round, own.from_step) == (order.generation, order.round, order.from_step)

    def keep(self, kept: Found) -> None:
        self.seen.add(kept.rank)
        self.to_send.append(kept)

    def give_up(self, rank: int) -> None:
        self.seen.add(rank)

    def is_done(self, num_ranks: int) -> bool:
        return self.order.round == 0 or (len(self.seen) >= num_ranks and not self.to_send)


def main() -> None:
    # Ctrl-C in a terminal and Slurm's SIGTERM go to all processes; this one is needed until its agent leaves
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.excepthook = _die
    run, component = run_directory(Path(sys.argv[1])), sys.argv[2]
    settings = load_settings(run)
    node = node_directory(settings.run_id, component, memory_root=Path(settings.memory_root))
    Courier(component, node=node, settings=settings, token=run.token.read_bytes()).run()
    os._exit(0)  # without waiting for copies in hand: what is half done does not exist


def _die(failed: threading.ExceptHookArgs) -> None:
    """A bug ends the courier: the agent starts another one, which is better than one that is half alive."""
    traceback.print_exception(failed.exc_type, failed.exc_value, failed.exc_traceback)
    os._exit(1)


def _be_nice() -> None:
    """This thread gives way to training: Linux has a niceness for each thread (sched(7))."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _write(message: CourierMessage) -> None:
    with contextlib.suppress(BrokenPipeError):  # the agent is gone; stdin says so too
        os.write(1, msgspec.json.encode(message) + b"\n")


if __name__ == "__main__":
    main()
