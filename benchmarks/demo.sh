#!/bin/sh
# `make demo`: the three commands, bare, on the packaged model; ends with the tables and the name of the report.
set -eu
cd "$(dirname "$0")/.."

step() {
    printf '\n$ %s\n' "$*" >&2
    "$@"
}

step glm5-quant calibrate
step glm5-quant export
step glm5-quant verify
step glm5-quant eval --long-dialogue 200 --report glm5-quant-work/report.html
printf '\nThe report: glm5-quant-work/report.html\n' >&2
