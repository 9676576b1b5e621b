#!/usr/bin/env bash
# Train on a Cloud TPU VM slice: creates it, installs the project on every host, and runs the same command on all, which
# find each other by the slice's metadata.
#
#   bash experiments/launch/tpu_vm.sh --name jaxrl --zone us-west4-a --type v5litepod-16 --spot -- \
#       jaxrl train --model Qwen/Qwen3-8B --prompts gs://bucket/prompts.jsonl --output gs://bucket/runs/a
#
# --name NAME, --zone ZONE, --type TYPE, --version RUNTIME, --project PROJECT, --spot, --keep (do not delete the slice at
# the end); --dry-run prints the commands. Run it in the project's folder. Hosts of a slice share no disk: the output is a
# bucket.
#
# A spot slice may be taken away. The run then saves its state; the slice is created again and --resume auto goes on.
set -euo pipefail

name=jaxrl zone="" type="" version=v2-alpha-tpuv5-lite project="" spot="" keep="" dry=""
while [[ $# -gt 0 && $1 != -- ]]; do
  case $1 in
    --name) name=$2; shift 2 ;;
    --zone) zone=$2; shift 2 ;;
    --type) type=$2; shift 2 ;;
    --version) version=$2; shift 2 ;;
    --project) project=$2; shift 2 ;;
    --spot) spot=yes; shift ;;
    --keep) keep=yes; shift ;;
    --dry-run) dry=yes; shift ;;
    *) echo "error: unknown option $1" >&2; exit 2 ;;
  esac
done
[[ $zone && $type ]] || { echo "error: give --zone and --type, such as --zone us-west4-a --type v5litepod-16" >&2; exit 2; }
[[ ${1:-} == -- && $# -gt 1 ]] || { echo "error: the command follows --, such as -- jaxrl train --output gs://bucket/a" >&2; exit 2; }
shift

where=(--zone="$zone")
[[ -z $project ]] || where+=(--project="$project")
tpu=(gcloud compute tpus tpu-vm)
archive=/tmp/jaxrl-$name.tar.gz

run() { if [[ $dry ]]; then printf '%q ' "$@"; echo; else "$@"; fi; }
# pid 1 of an ssh session is a shell: exec makes the program itself receive signals.
command="cd jaxrl_llm && exec .venv/bin/$(printf '%q ' "$@")--distributed auto --resume auto"

begin() {
  run "${tpu[@]}" create "$name" "${where[@]}" --accelerator-type="$type" --version="$version" ${spot:+--spot}
  run git archive --format=tar.gz --output="$archive" HEAD
  run "${tpu[@]}" scp "$archive" "$name:jaxrl_llm.tar.gz" "${where[@]}" --worker=all
  run "${tpu[@]}" ssh "$name" "${where[@]}" --worker=all --command="mkdir -p jaxrl_llm && tar -xzf jaxrl_llm.tar.gz -C jaxrl_llm && cd jaxrl_llm && python3 -m venv .venv && .venv/bin/pip install --quiet -e '.[run,data,verifiers,tpu]' gcsfs"
}

state() { "${tpu[@]}" describe "$name" "${where[@]}" --format='value(state)' 2>/dev/null || echo NONE; }

remove() { run "${tpu[@]}" delete "$name" "${where[@]}" --quiet; }

if [[ $dry ]]; then
  begin
  run "${tpu[@]}" ssh "$name" "${where[@]}" --worker=all --command="$command"
  [[ $keep ]] || remove
  exit 0
fi
while true; do
  case $(state) in
    READY) ;;
    NONE) begin ;;
    *) remove; begin ;;
  esac
  status=0
  run "${tpu[@]}" ssh "$name" "${where[@]}" --worker=all --command="$command" || status=$?
  # Taken away, or saved after SIGTERM: go on. Anything else is the end.
  if [[ $status == 0 || ( $status != 75 && $(state) == READY ) ]]; then break; fi
  sleep 60
done
[[ $keep ]] || remove
exit "$status"
