"""Link tables: which port of which module of an accelerator board is wired to which.

SOURCE: each table of `oam_links.json` names the figures of the OAM and UBB specifications that it was read from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from importlib.resources import files
from typing import Literal

import msgspec

from dougong.errors import UserError
from dougong.spec.values import did_you_mean

_PORT = re.compile(r"([0-9]+)\.([0-9]+)([LH]?)\Z")


class Port(msgspec.Struct, frozen=True, order=True):
    """A port of a module, or the first (`L`) or second (`H`) eight lanes of one."""

    module: int
    port: int
    half: Literal["", "L", "H"] = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.port}{self.half}"


class Link(msgspec.Struct, frozen=True):
    """A wire between two ports. `is_cabled`: it leaves the board through a connector."""

    a: Port
    b: Port
    is_cabled: bool = False


class LinkTable(msgspec.Struct, frozen=True, kw_only=True):
    """The wiring of one board. `lanes` is the width of each link."""

    name: str
    lanes: int
    links: tuple[Link, ...]
    source: str
    free: str = ""

    @property
    def num_modules(self) -> int:
        return len(self.modules)

    @property
    def modules(self) -> tuple[int, ...]:
        return tuple(sorted({port.module for link in self.links for port in (link.a, link.b)}))

    def num_links(self, a: int, b: int) -> int:
        """How many links join modules `a` and `b`."""
        return sum({link.a.module, link.b.module} == {a, b} for link in self.links)

    def degree(self, module: int) -> int:
        """How many links end at `module`."""
        return sum(module in (link.a.module, link.b.module) for link in self.links)


def link_table(name: str) -> LinkTable:
    """The table called `name`; case does not count. Raises UserError with the nearest names."""
    for known, table in _tables().items():
        if known.lower() == name.lower():
            return table
    raise UserError(
        f"no link table is called {name!r}", where="link tables", mend=did_you_mean(name, link_table_names())
    )


def link_table_names() -> tuple[str, ...]:
    """The names of all link tables."""
    return tuple(_tables())


def parse_link_tables(text: str) -> tuple[LinkTable, ...]:
    """The tables of a JSON text as `oam_links.json` has them. Raises UserError for a port wired twice."""
    document = msgspec.json.decode(text, type=_Document)
    return tuple(_table(name, raw) for name, raw in document.topologies.items())


class _Topology(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    src: str
    lanes: int
    links: tuple[tuple[str, str], ...]
    cabled: tuple[tuple[str, str], ...] = ()
    free: str = ""


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    note: str
    topologies: dict[str, _Topology]


@lru_cache(maxsize=1)
def _tables() -> dict[str, LinkTable]:
    text = (files("dougong.spec.catalog") / "oam_links.json").read_text(encoding="utf-8")
    return {table.name: table for table in parse_link_tables(text)}


def _table(name: str, raw: _Topology) -> LinkTable:
    cabled = {frozenset(pair) for pair in raw.cabled}
    links = tuple(Link(_port(name, a), _port(name, b), is_cabled=frozenset((a, b)) in cabled) for a, b in raw.links)
    _check_ports(name, links)
    return LinkTable(name=name, lanes=raw.lanes, links=links, source=raw.src, free=raw.free)


def _port(table: str, text: str) -> Port:
    match = _PORT.match(text)
    if match is None:
        raise UserError(
            f"{text!r} is not a port", where=f"link table {table}", mend="write module.port, or module.portL"
        )
    half: Literal["", "L", "H"] = "L" if match[3] == "L" else "H" if match[3] == "H" else ""
    return Port(int(match[1]), int(match[2]), half)


def _check_ports(table: str, links: Iterable[Link]) -> None:
    taken: set[Port] = set()
    for link in links:
        if link.a.module == link.b.module:
            raise _miswired(table, link.a, "is wired to its own module")
        for port in (link.a, link.b):
            # A whole port takes both its halves, and cannot be taken when one of them is.
            clashes = {port, Port(port.module, port.port)} if port.half else {_half(port, "L"), _half(port, "H"), port}
            if clashes & taken:
                raise _miswired(table, port, "is wired twice")
            taken.add(port)


def _half(port: Port, half: Literal["L", "H"]) -> Port:
    return Port(port.module, port.port, half)


def _miswired(table: str, port: Port, what: str) -> UserError:
    return UserError(f"port {port} {what}", where=f"link table {table}", mend="wire each port once, to another module")
