#!/bin/sh
# `make demo`: the commands on the packaged model; ends with the tables and the name of the report.
# In a folder of its own, made anew: what an older state of the package left there is no journal for this one.
set -eu
cd "$(dirname "$0")/.."
work=glm5-quant-demo
rm -rf "$work"

step() {
    printf '\n$ %s\n' "$*" >&2
    "$@"
}

step glm5-quant calibrate --work-dir "$work"
step glm5-quant export --work-dir "$work"
step glm5-quant verify --work-dir "$work"
step glm5-quant eval --long-dialogue 200 --work-dir "$work" --report "$work/report.html"
printf '\nThe report: %s\n' "$work/report.html" >&2
