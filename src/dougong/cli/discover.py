"""`dougong discover`: the cluster description of this machine."""

from __future__ import annotations

import platform
from pathlib import Path

import click

from dougong.errors import UserError, WorldError


@click.command()
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file, not to stdout.")
@click.option("--force", is_flag=True, help="Overwrite the output file.")
def discover(output: Path | None, force: bool) -> None:
    """Describe this machine as a cluster of one node."""
    from dougong.backend.local.discover import discover as discover_machine
    from dougong.backend.nvml import NvmlProbe
    from dougong.spec.cluster import dump_cluster

    if output is not None and output.exists() and not force:
        raise UserError(f"{output} exists", where="--output", mend="choose another file, or add --force")
    discovered = discover_machine(hostname=platform.node(), probes=(NvmlProbe(),))
    for note in discovered.notes:
        click.echo(f"note: {note}", err=True)
    text = dump_cluster(discovered.cluster)
    if output is None:
        click.echo(text, nl=False)
        return
    write_whole(output, text)
    click.echo(f"wrote {output}", err=True)


def write_whole(path: Path, text: str) -> None:
    """Put `text` at `path` in one step: nobody ever sees half of it. Raises WorldError."""
    import os
    import tempfile

    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise WorldError(f"cannot write {path}: {error.strerror}") from error
    draft = Path(name)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.chmod(0o644)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise WorldError(f"cannot write {path}: {error.strerror}") from error
