#!/usr/bin/env bash
# Train on TPU slices of a GKE cluster through xpk.
#
#   bash experiments/launch/gke_xpk.sh --cluster pod --zone us-west4-a --project mine --type v5litepod-16 --slices 2 \
#       --name jaxrl-a --image gcr.io/mine/jaxrl -- \
#       jaxrl train --model Qwen/Qwen3-8B --prompts gs://bucket/prompts.jsonl --output gs://bucket/runs/a
#
# --cluster NAME, --name WORKLOAD, --type TPU_TYPE, --slices N, --image DOCKER_IMAGE (with this project and gcsfs
# installed), --zone ZONE, --project PROJECT, --restarts N; --dry-run prints the command. Pods share no disk: the output is
# a bucket.
#
# Before a pod is taken away GKE sends SIGTERM. The run saves its state and ends with status 75; the workload is started
# again, --restarts times at most, and --resume auto goes on.
set -euo pipefail

cluster="" name=jaxrl type="" slices=1 image="" zone="" project="" restarts=100 dry=""
while [[ $# -gt 0 && $1 != -- ]]; do
  case $1 in
    --cluster) cluster=$2; shift 2 ;;
    --name) name=$2; shift 2 ;;
    --type) type=$2; shift 2 ;;
    --slices) slices=$2; shift 2 ;;
    --image) image=$2; shift 2 ;;
    --zone) zone=$2; shift 2 ;;
    --project) project=$2; shift 2 ;;
    --restarts) restarts=$2; shift 2 ;;
    --dry-run) dry=yes; shift ;;
    *) echo "error: unknown option $1" >&2; exit 2 ;;
  esac
done
[[ $cluster && $type && $image ]] || { echo "error: give --cluster, --type and --image" >&2; exit 2; }
[[ ${1:-} == -- && $# -gt 1 ]] || { echo "error: the command follows --, such as -- jaxrl train --output gs://bucket/a" >&2; exit 2; }
shift

# xpk passes SIGTERM to the shell of the command: exec makes that the program itself.
command="exec $(printf '%q ' "$@")--distributed auto --resume auto"
xpk=(xpk workload create --cluster "$cluster" --workload "$name" --tpu-type="$type" --num-slices="$slices" --docker-image="$image")
[[ -z $zone ]] || xpk+=(--zone="$zone")
[[ -z $project ]] || xpk+=(--project="$project")
xpk+=(--max-restarts="$restarts" --restart-on-exit-codes=75 --termination-grace-period-seconds=120 --command "$command")
if [[ $dry ]]; then printf '%q ' "${xpk[@]}"; echo; else "${xpk[@]}"; fi
