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

# The file, the extras that it holds, further requirements, and the locks with which it must agree.
LOCKS = (
    ("run.txt", ("train", "nvidia"), (), ()),
    ("dev.txt", ("train", "nvidia", "crypto", "docs", "dev"), (), ("run.txt",)),
    ("frameworks.txt", ("train", "hf", "lightning"), ("tests.in",), ("run.txt", "dev.txt")),
)


def main() -> int:
    for name, extras, others, agrees_with in LOCKS:
        lines = _compile(extras, others=others, agrees_with=agrees_with)
        strange = [line for line in lines if not ENTRY.fullmatch(line)]
        if strange:
            print(f"{name}: these lines are neither a pinned name nor a hash:", *strange, sep="\n  ", file=sys.stderr)
            return 1
        (REQUIREMENTS / name).write_text("\n".join(lines) + "\n")
        print(f"requirements/{name}: {sum('==' in line for line in lines)} packages")
    return 0


def _compile(extras: tuple[str, ...], *, others: tuple[str, ...], agrees_with: tuple[str, ...]) -> list[str]:
    """The lines of a lock of the base dependencies, `extras` and `others`, scrubbed of comments and options."""
    command = ["uv", "pip", "compile", "pyproject.toml", "requirements/torch-needs.in"]
    command += [f"requirements/{name}" for name in others]
    command += [f"--extra={extra}" for extra in extras]
    command += ["--override=requirements/no-torch.in", "--universal", "--python-version=3.11"]
    command += ["--fork-strategy=fewest", "--generate-hashes", "--no-annotate", "--no-header", "--quiet"]
    command += [f"--constraints=requirements/{name}" for name in agrees_with]
    done = subprocess.run(command, cwd=REQUIREMENTS.parent, check=True, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if line and not line.lstrip().startswith(("#", "--index"))]


if __name__ == "__main__":
    raise SystemExit(main())
