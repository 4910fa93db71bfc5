#!/usr/bin/env bash
# Install the Debian packages that the tests need and this machine lacks. Does nothing where all is there.
set -euo pipefail

# command, the package that brings it
needs='
git git
ps procps
flock util-linux
strace strace
'
missing=()
while read -r command package; do
  [ -z "$command" ] || command -v "$command" >/dev/null || missing+=("$package")
done <<<"$needs"
"${PYTHON:-python3}" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)

if [ ${#missing[@]} -eq 0 ]; then
  echo 'deps: everything is there'
  exit 0
fi
if ! command -v apt-get >/dev/null; then
  echo "deps: missing, and no apt-get here to install them: ${missing[*]}" >&2
  exit 2
fi
echo "deps: installing ${missing[*]}"
as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo)
"${as_root[@]}" apt-get -qq update
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}"
