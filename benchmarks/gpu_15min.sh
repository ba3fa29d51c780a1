#!/bin/sh
# Everything for 15 minutes of a GPU, in two commands (benchmarks/README.md):
#
#     benchmarks/gpu_15min.sh PREPARED OUT          at most 560 seconds
#     benchmarks/gpu_15min.sh PREPARED OUT again    at most 200: what failed once more, then what was not reached
#
# PREPARED is the folder that `run_gpu.py --prepare` wrote. The second command takes the first one's results from OUT/results.jsonl, or from
# PREPARED/results.jsonl where OUT is new. Options of run_gpu.py may follow.
set -eu
run() {
    seconds=$1
    shift
    exec timeout --signal=TERM --kill-after=10 $((seconds - 10)) "${PYTHON:-python3}" "$(dirname "$0")/run_gpu.py" "$@"
}
[ $# -ge 2 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
prepared=$1 out=$2
shift 2
if [ "${1:-}" != again ]; then
    run 560 --prepared "$prepared" --out "$out" --deadline 520 "$@"
fi
shift
earlier=$out/results.jsonl
[ -f "$earlier" ] || earlier=$prepared/results.jsonl
run 200 --prepared "$prepared" --out "$out" --again "$earlier" --deadline 160 --tools-before 60 "$@"
