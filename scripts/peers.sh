#!/usr/bin/env bash
# Bring .peers/NAME to what its lock says, for what `make bench-run` measures beside Dougong:
#
#   scripts/peers.sh          set up every peer; one that cannot be had is said and left out
#   scripts/peers.sh lock     write bench/peers/*.txt anew from the first line of this list and today's packages
#
# Each has an environment of its own that sees the torch of .venv by a .pth line: the same build for all, and on disk once.
#   PYTHON  the interpreter to build on (default python3)
set -euo pipefail
cd "$(dirname "$0")/.."

declare -A packages=(
  [dlrover]='dlrover[torch,k8s]==0.6.1 protobuf pydantic' # what its local master imports, which [torch] alone does not bring
  [nvrx]='nvidia-resiliency-ext==0.4.1'
)
python=${PYTHON:-python3}
say() { printf 'dougong: %s\n' "$*" >&2; }

write_locks() {
  local name
  for name in "${!packages[@]}"; do
    # shellcheck disable=SC2086  # several packages
    printf '%s\n' ${packages[$name]} | .venv/bin/uv pip compile - --universal --python-version=3.11 --quiet \
      --fork-strategy=fewest --generate-hashes --no-annotate --no-header --override=requirements/no-torch.in |
      grep -v '^ *\(#\|--index\)' >"bench/peers/$name.txt"
    say "bench/peers/$name.txt: $(grep -c == "bench/peers/$name.txt") packages"
  done
}

# dlrover 0.6.1 starts its local master through a class of torch that has one argument more since torch 2.9.
mend() {
  local file=.peers/$1/lib/python*/site-packages/dlrover/trainer/torch/elastic_run.py
  # shellcheck disable=SC2086  # a pattern
  [ "$1" != dlrover ] || sed -i 's/SubprocessHandler(cmd, args, {}, "", "", 0)/SubprocessHandler(cmd, args, {}, "", "", 0, None)/' $file
}

set_up() {
  local name=$1 lock=bench/peers/$1.txt torch_at wanted
  torch_at=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  wanted=$(cat "$lock" requirements/torch.txt scripts/peers.sh - <<<"$torch_at $("$python" --version)" | cksum)
  [ "$(cat ".peers/$name/ready" 2>/dev/null)" != "$wanted" ] || return 0
  say "installing $(grep -c == "$lock") locked packages into .peers/$name ($lock)"
  rm -rf ".peers/$name"
  "$python" -m venv ".peers/$name"
  if ! ".peers/$name/bin/python" -m pip --disable-pip-version-check --no-input -qq install \
    --require-hashes --no-deps --only-binary=:all: -r "$lock"; then
    say "$name could not be installed; its rows will say so"
    return 0
  fi
  echo "$torch_at" >"$(".peers/$name/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch_of_venv.pth"
  mend "$name"
  echo "$wanted" >".peers/$name/ready"
}

python=$("$python" -c 'import sys; print(sys._base_executable)')
if [ "${1:-}" = lock ]; then
  write_locks
  exit 0
fi
for name in "${!packages[@]}"; do set_up "$name"; done
