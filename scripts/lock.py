"""Write the lock files `requirements/*.txt` anew: names, versions and hashes, and never an address.

The lock holds for every Python from 3.11 on and for every platform. `make lock` runs this; see
docs/decisions/0003-lock-without-addresses.md.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"
ENTRY = re.compile(r"[a-z0-9-]+==[^\s;]+(?: ; [^\\]+)?(?: \\)?|    --hash=sha256:[0-9a-f]{64}(?: \\)?")

# The file, the extras that it holds, and whether it must agree with run.txt.
LOCKS = (("run.txt", ("train", "nvidia"), False), ("dev.txt", ("train", "nvidia", "docs", "dev"), True))


def main() -> int:
    for name, extras, agrees_with_run in LOCKS:
        lines = _compile(extras, agrees_with_run=agrees_with_run)
        strange = [line for line in lines if not ENTRY.fullmatch(line)]
        if strange:
            print(f"{name}: these lines are neither a pinned name nor a hash:", *strange, sep="\n  ", file=sys.stderr)
            return 1
        (REQUIREMENTS / name).write_text("\n".join(lines) + "\n")
        print(f"requirements/{name}: {sum('==' in line for line in lines)} packages")
    return 0


def _compile(extras: tuple[str, ...], *, agrees_with_run: bool) -> list[str]:
    """The lines of a lock of the base dependencies and `extras`, scrubbed of comments and options."""
    command = ["uv", "pip", "compile", "pyproject.toml", "requirements/torch-needs.in"]
    command += [f"--extra={extra}" for extra in extras]
    command += ["--override=requirements/no-torch.in", "--universal", "--python-version=3.11"]
    command += ["--fork-strategy=fewest", "--generate-hashes", "--no-annotate", "--no-header", "--quiet"]
    if agrees_with_run:
        command.append("--constraints=requirements/run.txt")
    done = subprocess.run(command, cwd=REQUIREMENTS.parent, check=True, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if line and not line.lstrip().startswith(("#", "--index"))]


if __name__ == "__main__":
    raise SystemExit(main())
