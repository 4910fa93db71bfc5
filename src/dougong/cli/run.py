"""`dougong run`: start a training script on nodes and keep it going."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
@click.option("--cluster", type=click.Path(path_type=Path), help="Cluster description; its first nodes are used.")
@click.option("--nodes", type=click.IntRange(min=1), help="Nodes that train [default: 1].")
@click.option("--procs-per-node", type=click.IntRange(min=1), help="Ranks on each node [default: 1].")
@click.option("--spares", type=click.IntRange(min=0), default=0, help="Nodes that wait to replace a lost one.")
@click.option(
    "--min-nodes", type=click.IntRange(min=1), help="Go on with so few if the others are lost [default: all]."
)
@click.option("--backend", type=click.Choice(["local"]), default="local", help="What holds the nodes.")
@click.option("--chaos", help="A schedule of faults to inject, or `default`.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where the run keeps its files [default: runs/TIME].")
@click.option("--resume", type=click.Path(path_type=Path), help="Go on with a stopped run; no script is given then.")
@click.option("--checkpoint-dir", help="Path or fsspec URL of the durable checkpoints [default: in the run directory].")
@click.option(
    "--memory-every",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="Steps between memory checkpoints; 0 = chosen from what they cost and from the failures.",
)
@click.option(
    "--durable-every",
    type=click.IntRange(min=0),
    default=50,
    show_default=True,
    help="Steps between durable checkpoints; 0 = chosen likewise.",
)
@click.option(
    "--mtbf",
    metavar="DURATION",
    help="Time between interruptions of the job, as far as known (3h), for intervals that are chosen.",
)
@click.option("--keep", type=click.IntRange(min=1), default=3, show_default=True, help="Durable checkpoints kept.")
@click.option(
    "--checkpoint-key", type=click.Path(path_type=Path), help="Encrypt durable checkpoints with the key in this file."
)
@click.option(
    "--retention-lock", metavar="DURATION", help="How long nothing deletes a durable checkpoint, for example 7d."
)
@click.option("--lock-key", type=click.Path(path_type=Path), help="The owner's key, which opens a retention lock.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of policy, hang rule or saves, such as hang.startup_s=7200 (see the guide).",
)
@click.option("--preflight", is_flag=True, help="Test every node, spares included, before the start (under a minute).")
@click.option("--time-limit", help="Wall time of the job, such as 4h; under Slurm it is known [default: none].")
@click.option("--save-before", default="120s", show_default=True, help="Save and leave so long before the limit.")
@click.option("--requeue", is_flag=True, help="Put the Slurm job back into its queue after that.")
@click.option("--webhook", default="", help="URL that is told of each interruption.")
@click.option(
    "--reference", type=click.Path(path_type=Path), help="An undisturbed run to compare samples and losses with."
)
@click.option("--no-score", is_flag=True, help="Do not print the scorecard at the end.")
@click.option("--oversubscribe", is_flag=True, help="Allow more ranks than CPUs.")
@click.option("--max-restarts", "--max_restarts", type=click.IntRange(min=0), help="Give up after this many restarts.")
@click.option("--nnodes", metavar="N|MIN:MAX", help="As torchrun's.")
@click.option("--nproc-per-node", "--nproc_per_node", metavar="N|auto|cpu|gpu", help="As torchrun's.")
@click.option(
    "--rdzv-endpoint", "--rdzv_endpoint", metavar="HOST:PORT", help="As torchrun's: where the controller listens."
)
@click.option("--rdzv-backend", "--rdzv_backend", help="Accepted for torchrun's sake; has no effect.")
@click.option("--rdzv-id", "--rdzv_id", help="As torchrun's: the name of the run.")
@click.option("--rdzv-conf", "--rdzv_conf", help="Accepted for torchrun's sake; has no effect.")
@click.option("--standalone", is_flag=True, help="As torchrun's: all on this machine.")
@click.option("--node-rank", "--node_rank", type=click.IntRange(min=0), help="As torchrun's, with --rdzv-endpoint.")
@click.option("--master-addr", "--master_addr", help="As torchrun's, with --node-rank.")
@click.option(
    "--master-port",
    "--master_port",
    type=click.IntRange(1, 65535),
    help="Port of rank 0's store [default: a free one each time].",
)
@click.option("--monitor-interval", "--monitor_interval", help="Accepted for torchrun's sake; has no effect.")
@click.option("--log-dir", "--log_dir", help="Accepted for torchrun's sake; logs are in the run directory.")
@click.option("-m", "--module", is_flag=True, help="The script is a module name, as with python -m.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run(command: tuple[str, ...], **options: object) -> int:
    """Run SCRIPT on nodes, through every fault.

    \b
    dougong run --nodes 2 --spares 1 -- train.py --lr 3e-4
    dougong run --resume runs/latest

    The script is any that torchrun would run. Exit code: 0 finished, 1 given up, 130 stopped and resumable.
    """
    from dougong.cli.run_options import RunOptions
    from dougong.cli.run_start import go_on, start

    chosen = RunOptions(command=command, **options)  # pyright: ignore[reportArgumentType]
    return go_on(chosen) if chosen.resume is not None else start(chosen)
