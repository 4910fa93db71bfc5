"""Fills pages from what they describe: event kinds, the command line, the Python interface, results of benchmarks.

A page holds `<!-- from code: NAME -->` where the generated Markdown goes; NAME is a key of `WRITERS`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import msgspec
from sphinx.application import Sphinx

from dougong.event import kinds

# What a script uses of `dougong.attach` and of the objects it returns.
PUBLIC = {
    "attach": (),
    "Job": ("steps", "num_steps", "num_tokens", "resumed_step", "compiling", "evaluating"),
    "Step": ("record",),
}
LOOP = ("restore", "begin_step", "end_step", "evaluating", "finish", "batches", "num_steps")
RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
MARK = re.compile(r"<!-- from code: ([a-z-]+) -->")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", fill)
    # The pages change with the code, which Sphinx does not watch.
    app.connect("env-get-outdated", lambda *_: ["reference/events", "reference/cli", "reference/python", "benchmarks"])
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def fill(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = MARK.sub(lambda match: "\n".join(WRITERS[match[1]]()), source[0])


def write_event_kinds() -> Iterator[str]:
    """A section for every kind, in the order in which they are defined."""
    for kind in typing.get_args(kinds.AnyEvent):
        yield from (f"## {kind.__name__}", "", inspect.getdoc(kind) or "", "")
        yield from ("| field | type | default |", "|---|---|---|")
        for field in msgspec.structs.fields(kind):
            yield f"| `{field.name}` | {_cell(kind.__annotations__[field.name])} | {_default(field)} |"
        yield ""


def write_cause_classes() -> Iterator[str]:
    yield ", ".join(f"`{name}`" for name in typing.get_args(kinds.CauseClass)) + "."


def write_command_line() -> Iterator[str]:
    """The help text of every command, as a terminal shows it."""
    module = importlib.import_module("dougong.cli.main")
    group = next(value for value in vars(module).values() if isinstance(value, click.Group))
    yield from _command(group, "dougong", parent=None)


def write_attach() -> Iterator[str]:
    """`attach`, and what a script uses of the objects it gets from it."""
    import dougong

    module = inspect.getmodule(dougong.attach)
    for name, members in PUBLIC.items():
        value = getattr(module, name)
        heading = f"class {name}" if inspect.isclass(value) else name
        yield from (f"## {heading}", "", *_signature(name, value), inspect.getdoc(value) or "", "")
        for member in members:
            yield from _member(f"{name}.{member}", inspect.getattr_static(value, member))


def write_init_process_group() -> Iterator[str]:
    import dougong

    yield from _member("init_process_group", dougong.init_process_group, level=2)


def write_global_batches() -> Iterator[str]:
    import dougong

    value = dougong.GlobalBatches
    signature = str(inspect.signature(value)).replace("'", "").removesuffix(" -> None")
    yield from ("## class GlobalBatches", "", "```python", f"GlobalBatches{signature}", "```", "")
    yield from (inspect.getdoc(value) or "", "")
    for member in ("loss_weight", "whole", "own"):
        yield from _member(f"GlobalBatches.{member}", inspect.getattr_static(value, member))


def write_loop() -> Iterator[str]:
    """`loop`, and the hooks that it returns."""
    import dougong
    from dougong.run.hooks import Loop

    yield from _member("loop", dougong.loop, level=2)
    for member in LOOP:
        yield from _member(f"Loop.{member}", inspect.getattr_static(Loop, member))


def write_logs() -> Iterator[str]:
    import dougong

    for name in ("summary_writer", "log_directory", "keep_mlflow_run"):
        yield from _member(name, getattr(dougong, name), level=2)


def write_bench_results() -> Iterator[str]:
    """What `make bench` left, file by file, name by name."""
    for path in sorted(RESULTS.glob("*.json")):
        yield from (f"### {path.stem}", "", "| name | value |", "|---|---|")
        for name, value in _flat(json.loads(path.read_text()), ""):
            yield f"| `{name}` | `{value}` |"
        yield ""


def _flat(value: object, name: str) -> Iterator[tuple[str, str]]:
    """Leaves of a JSON value with their paths; a list of plain values is one leaf."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        for index, part in enumerate(value):
            yield from _flat(part, f"{name}[{index}]")
    else:
        yield name, json.dumps(value, ensure_ascii=False).replace("|", "\\|")


def _cell(annotation: object) -> str:
    text = annotation if isinstance(annotation, str) else str(annotation)
    return "`" + text.replace("|", "or") + "`"


def _default(field: msgspec.structs.FieldInfo) -> str:
    return "required" if field.required else f"`{field.default!r}`"


def _command(command: click.Command, path: str, parent: click.Context | None) -> Iterator[str]:
    context = click.Context(command, info_name=path.split()[-1], parent=parent, terminal_width=88)
    yield from (f"## {path}", "", "```text", command.get_help(context), "```", "")
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None and not child.hidden:
                yield from _command(child, f"{path} {name}", context)


def _member(path: str, member: object, *, level: int = 3) -> Iterator[str]:
    yield from (f"{'#' * level} {path}", "")
    if not isinstance(member, property):
        yield from _signature(path, member)
    yield from (inspect.getdoc(member) or "", "")


def _signature(name: str, value: object) -> tuple[str, ...]:
    if inspect.isclass(value):  # a script never makes one itself
        return ()
    assert callable(value)
    signature = str(inspect.signature(value)).replace("'", "").replace("(self, ", "(")
    return ("```python", f"{name}{signature}", "```", "")


WRITERS: dict[str, Callable[[], Iterator[str]]] = {
    "event-kinds": write_event_kinds,
    "cause-classes": write_cause_classes,
    "command-line": write_command_line,
    "attach": write_attach,
    "init-process-group": write_init_process_group,
    "global-batches": write_global_batches,
    "loop": write_loop,
    "logs": write_logs,
    "bench-results": write_bench_results,
}
