#!/usr/bin/env bash
# Run this worker's part of a job on a slice:  worker.sh xla|jax JOB.json [HOSTS [GRACE]]
#
# JOB is a path or URL. The VM's metadata have the addresses of the workers and the number of this
# one. Standard output has the JSON lines of runtimes/process/host_agent.py. The agent stops, with a
# checkpoint, when standard input closes: with the connection. GRACE: seconds for that checkpoint.
set -euo pipefail
runtime=$1
job=$2
grace=${4:-60}
case "$job" in
  *://*) ;;
  *) job=$(realpath "$job") ;;
esac
cd "$(dirname "$0")/../.."
case "$runtime" in
  jax) python=$PWD/.venv/bin/python ;;
  xla) python=$PWD/.venv-xla/bin/python ;;
  *) echo "worker.sh: $runtime is neither xla nor jax" >&2; exit 2 ;;
esac

attribute() {
  curl --silent --fail --header 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}

host=$(attribute agent-worker-number)
# One "name:port:address" per worker, separated by commas, in order of their numbers.
IFS=, read -ra workers <<<"$(attribute worker-network-endpoints)"
count=${#workers[@]}
say() { printf '{"host": %d, "event": %s}\n' "$host" "$1"; }
if [ "${3:-$count}" != "$count" ]; then
  say "\"error\", \"wrong_input\": true, \"message\": \"hosts: the slice has $count hosts, not $3: set $count\""
  say '"exit", "code": 2'
  exit
fi

# The agents of this user's trainings on this worker.
agents() {
  local agent
  for agent in $(pgrep -u "$UID" -f 'runtimes[.]process[.]host_agent '); do
    case "$(readlink "/proc/$agent/cwd")" in "$(dirname "$PWD")"/kiln-*) echo "$agent" ;; esac
  done
}
# gcloud repeats a command whose connection was cut. Other workers wait for the ranks of the first
# start, so that a second one could not join them: the attempt ends, with a checkpoint.
attempt=$(basename "$job" .json)
if ! mkdir "started-$attempt" 2>/dev/null; then
  pkill -TERM -f "host_agent .*/$attempt[.]json" || true
  say '"exit", "code": 143'
  exit
fi
# Ranks of an earlier attempt hold the chips, perhaps until their checkpoint is written.
for _ in $(seq "${grace%.*}"); do
  [ -n "$(agents)" ] || break
  kill -TERM $(agents) 2>/dev/null || true
  sleep 1
done
for agent in $(agents); do
  pkill -KILL -P "$agent" || true
  kill -KILL "$agent" 2>/dev/null || true
done

if [ -f "$PWD.env" ]; then
  # shellcheck source=/dev/null
  source "$PWD.env"
  rm -f "$PWD.env"
fi
export PYTHONPATH=$PWD
exec "$python" -P -u -m runtimes.process.host_agent "$job" --hosts "$count" --host "$host" \
  --address "${workers[0]##*:}:${MASTER_PORT:-8476}" --grace "$grace" --watch-stdin
