#!/usr/bin/env bash
# Train on SLURM: submits a batch job with one process on each node, which JAX detects.
#
#   bash experiments/launch/slurm.sh --nodes 2 --gpus 8 --time 12:00:00 -- \
#       jaxrl train --model Qwen/Qwen3-8B --prompts prompts.jsonl --output runs/a
#
# --nodes N, --gpus N (of each node; 0: none), --time LIMIT, --partition NAME, --name NAME; --dry-run prints what would be
# submitted. The folder of the run must be on a file system that all nodes share.
#
# SIGTERM comes 120 s before the time limit and at preemption. The run then saves its state and ends with status 75, the
# job is put into the queue again, and --resume auto goes on.
set -euo pipefail

nodes=1 gpus=8 time=24:00:00 partition="" name=jaxrl dry=""
while [[ $# -gt 0 && $1 != -- ]]; do
  case $1 in
    --nodes) nodes=$2; shift 2 ;;
    --gpus) gpus=$2; shift 2 ;;
    --time) time=$2; shift 2 ;;
    --partition) partition=$2; shift 2 ;;
    --name) name=$2; shift 2 ;;
    --dry-run) dry=yes; shift ;;
    *) echo "error: unknown option $1" >&2; exit 2 ;;
  esac
done
[[ ${1:-} == -- && $# -gt 1 ]] || { echo "error: the command follows --, such as -- jaxrl train --output runs/a" >&2; exit 2; }
shift

# One process on a node takes all of its GPUs; without --gpus-per-node JAX uses the CPUs.
resources=(--nodes="$nodes" --ntasks-per-node=1 --exclusive)
[[ $gpus == 0 ]] || resources+=(--gpus-per-node="$gpus")
[[ -z $partition ]] || resources+=(--partition="$partition")
options=("${resources[@]}" --time="$time" --job-name="$name" --requeue --open-mode=append --signal=TERM@120)
devices=""
[[ $gpus == 0 ]] || devices="export JAX_LOCAL_DEVICE_IDS=$(seq -s , 0 $((gpus - 1)))"

# Processes that were told to stop end one after another: none is killed while it saves.
job=$(cat <<JOB
#!/usr/bin/env bash
$devices
status=0
srun --kill-on-bad-exit=0 --wait=120 $(printf '%q ' "$@")--distributed auto --resume auto || status=\$?
if [[ \$status == 75 ]]; then scontrol requeue "\$SLURM_JOB_ID"; fi
exit \$status
JOB
)
bash -n <<< "$job"
if [[ $dry ]]; then
  printf 'sbatch'; printf ' %q' "${options[@]}"; printf " <<'JOB'\n%s\nJOB\n" "$job"
else
  sbatch "${options[@]}" <<< "$job"
fi
