#!/usr/bin/env bash
# Bring .venv to what a lock file says: scripts/venv.sh run | dev
# or .venv-frameworks, which holds the packages of others' training frameworks: scripts/venv.sh frameworks
#
# Quick when nothing changed. Two of these at once wait for each other. An interrupted one leaves .venv/unfinished
# behind, and the next one starts afresh, because pip takes a half-copied package for an installed one.
#   PYTHON  the interpreter to build on (default python3)
#   TORCH   what to give pip instead of `-r requirements/torch.txt`, for a machine that wants another build
set -euo pipefail
cd "$(dirname "$0")/.."

name=${1:?which lock: run, dev or frameworks}
venv=.venv
if [ "$name" = frameworks ]; then venv=.venv-frameworks; fi
lock=requirements/$name.txt
python=${PYTHON:-python3}
torch=${TORCH:--r requirements/torch.txt}
pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input -qq install)
say() { printf 'dougong: %s\n' "$*" >&2; }

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  say "$python is not a Python 3.11 or newer"
  say "  where: PYTHON=$python"
  say "  mend:  make PYTHON=/path/to/python3.11"
  exit 2
fi

# From inside an activated .venv, $python is the very thing that may be removed below.
python=$("$python" -c 'import sys; print(sys._base_executable)')

if command -v flock >/dev/null; then
  exec 9>"$venv.lock"
  flock 9
fi

version=$("$python" -c 'import sys; print(*sys.version_info[:3], sep=".")')
wanted=$(cat "$lock" requirements/torch.txt pyproject.toml scripts/venv.sh - <<<"$version $torch" | cksum)
if [ "$(cat "$venv/ready-$name" 2>/dev/null)" = "$wanted" ]; then
  touch "$venv/ready-$name"
  exit 0
fi

built_on=$("$venv/bin/python" -c 'import sys, pip; print(*sys.version_info[:3], sep=".")' 2>/dev/null || true)
if [ -e "$venv/unfinished" ] || [ "$built_on" != "$version" ]; then
  say "building $venv on Python $version"
  rm -rf "$venv"
  "$python" -m venv "$venv"
fi

say "installing $(grep -c == "$lock") locked packages ($lock)"
rm -f "$venv/ready-$name"
touch "$venv/unfinished"
"${pip[@]}" --require-hashes --no-deps --only-binary=:all: -r "$lock"
# shellcheck disable=SC2086  # TORCH may be several words
"${pip[@]}" --no-deps $torch
"${pip[@]}" --no-deps --no-build-isolation -e .

if ! why=$("$venv/bin/python" -c 'import torch' 2>&1); then
  say "this build of torch does not load: $(tail -n 1 <<<"$why")"
  say "  where: $torch"
  say "  mend:  for a CPU build, give pip its address: make TORCH='torch==2.13.0 --index-url ADDRESS'"
  say "         for a CUDA build with its libraries:   $venv/bin/pip install -e '.[train]'"
  exit 2
fi
rm "$venv/unfinished"
echo "$wanted" >"$venv/ready-$name"
