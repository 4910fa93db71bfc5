"""Short commands of the system, such as `ip` and `mount`, bounded in time."""

from __future__ import annotations

import subprocess

_LIMIT_S = 10.0


def command(*words: str) -> None:
    """Run it to its end. Raises OSError if it fails, is not there, or takes over 10 s; then it is killed."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_LIMIT_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{' '.join(words)}: not done within {_LIMIT_S:g} s") from None
    if done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
