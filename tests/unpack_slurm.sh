#!/usr/bin/env bash
# Slurm's daemons and commands from Debian's packages, unpacked into a folder: no root, nothing of the system changes.
#   bash tests/unpack_slurm.sh FOLDER
# FOLDER/bin has a starter of each program, which names the folder's libraries. Packages that are installed are used as they are.
set -euo pipefail
folder=$(realpath --canonicalize-missing "$1")
wanted=(slurmctld slurmd slurm-client munge)

fetch() {
  apt-get install --simulate --no-install-recommends "${wanted[@]}" > plan &&
    sed -n 's/^Inst \([^ ]*\).*/\1/p' plan | xargs --no-run-if-empty apt-get --quiet --quiet download
}

mkdir -p "$folder/packages" "$folder/bin"
cd "$folder/packages"
# A fresh container has no lists of packages, or old ones that name versions which are gone.
fetch 2> said || { apt-get --quiet --quiet update && fetch 2> said; } || {
  cat said >&2
  exit 1
}
for package in *.deb; do
  [ ! -e "$package" ] || dpkg --extract "$package" "$folder"
done

for program in "$folder"/usr/bin/* "$folder"/usr/sbin/*; do
  [ -f "$program" ] || continue
  name=$(basename "$program" -wlm) # Debian's alternatives drop this ending
  libraries=$(printf '%s:' "$folder"/usr/lib/*-linux-*/slurm-wlm "$folder"/usr/lib/*-linux-*)
  printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s "$@"\n' "${libraries%:}" "$program" > "$folder/bin/$name"
  chmod +x "$folder/bin/$name"
done
rm -r "$folder/packages"
