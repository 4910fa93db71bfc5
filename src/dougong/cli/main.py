"""The `dougong` command. Every subcommand is imported only when it is called, so that `--help` stays quick."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click

import dougong
from dougong.errors import DougongError, UserError

_COMMANDS = {
    "run": ("dougong.cli.run:run", "Keep a training script running through every fault."),
    "score": ("dougong.cli.score:score", "Judge a run: availability, goodput, MTBF, MFU …"),
    "events": ("dougong.cli.events:events", "Show what happened in a run."),
    "checkpoint": ("dougong.cli.checkpoint:checkpoint", "List, verify, export, unlock and remove durable checkpoints."),
    "simulate": ("dougong.cli.simulate:simulate", "Run a scenario on the simulated cluster."),
    "show": ("dougong.cli.show:show", "Check and show a cluster description."),
    "discover": ("dougong.cli.discover:discover", "Write the description of this machine."),
}


class _LazyGroup(click.Group):
    """A group whose commands are named here and imported when wanted."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module_name, attribute = _COMMANDS[cmd_name][0].split(":")
        command = getattr(importlib.import_module(module_name), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(dougong.__version__, prog_name="dougong")
def cli() -> None:
    """Plan, accept, share, run and judge the infrastructure that large models are trained and served on."""


def main(arguments: list[str] | None = None) -> None:
    """Run a command. Exits 0 on success, 1 if a check or the world failed, 2 for a user's mistake."""
    _open_closed_streams()
    try:
        result: Any = cli.main(args=arguments, prog_name="dougong", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "dougong"
        told = UserError(error.format_message(), where=f"command line of `{command}`", mend=f"see `{command} --help`")
        click.echo(f"dougong: {told}", err=True)
        sys.exit(told.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except DougongError as error:
        click.echo(f"dougong: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # the reader of our output has left; say nothing, also not at interpreter exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        # each command tells of the files it names; what is left is the disk or the terminal under our own output
        click.echo(f"dougong: {error.strerror or error}{f': {error.filename}' if error.filename else ''}", err=True)
        sys.exit(1)
    sys.exit(result if isinstance(result, int) else 0)


def _open_closed_streams() -> None:
    """A caller may have closed stdout or stderr; what is written there goes nowhere then."""
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


if __name__ == "__main__":
    main()
