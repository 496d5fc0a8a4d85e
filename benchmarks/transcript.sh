#!/bin/sh
# The four commands on a model of one's own, as they appear in a log file; the README shows what this printed.
#
#   sh benchmarks/transcript.sh MODEL CALIBRATION-DATA TEST-TEXT [calibrate options]
#
# Lines of layers in the middle are left out. Work folder: ./MODEL-work.
set -eu
model=$1 data=$2 text=$3
shift 3
work=$(basename "$model")-work
export COLUMNS=100

step() {
    printf '$ %s\n' "$*"
    "$@" 2>&1 | awk '
        /^layer [0-9]+\// { split($2, at, "/"); if (at[1] > 2 && at[1] < at[2]) { if (!cut++) print "..."; next } }
        { print; fflush() }'
    printf '\n'
}

step glm5-quant calibrate --model "$model" --dataset "$data" --work-dir "$work" "$@"
step glm5-quant export --work-dir "$work"
step glm5-quant verify --work-dir "$work"
step glm5-quant eval --work-dir "$work" --dataset "$text" --num-windows 24
