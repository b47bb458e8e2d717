#!/usr/bin/env bash
# Checks the GPU path on this machine: right, then fast. From the plain source tree, nothing is installed.
#
#   scripts/gpu_check.sh [--null] [--wheels DIR] [--model PATH] [--out DIR] [PART...]
#
# --null    dry run on the CPU with a tiny model: the same code, no measurement worth anything
# --wheels  folder with wheels of pure-Python dependencies that the machine lacks
# --model   a small real model (directory or GGUF file) whose tokens are compared with the CPU's
# PART      machine operators quantization attention tokens decode prefill serving; all of them if none is named
#
# Each part has a time limit of its own, together under nine minutes, and a part that fails does not stop the others.
# Results: a table here, OUT/PART.json for each part, OUT/PART.log where it failed.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
[ -x .venv/bin/python ] && python=${PYTHON:-.venv/bin/python}
null=() wheels=() model=() out=gpu_check_results parts=()
while [ $# -gt 0 ]; do
  case "$1" in
    --null) null=(--null) ;;
    --wheels) wheels=("$2"); shift ;;
    --model) model=(--model "$2"); shift ;;
    --out) out=$2; shift ;;
    --*) echo "unknown option $1; see the head of $0" >&2; exit 2 ;;
    *) parts+=("$1") ;;
  esac
  shift
done
[ ${#parts[@]} -eq 0 ] && parts=(machine operators quantization attention tokens decode prefill serving)

tree=$("$python" scripts/gpu_check/plain_tree.py "${wheels[@]}") || exit 1
export PYTHONPATH="$tree:scripts/gpu_check${PYTHONPATH:+:$PYTHONPATH}"
export TOKENIZERS_PARALLELISM=false
mkdir -p "$out"

limit() { # seconds that a part may take
  case "$1" in
    machine) echo 20 ;; operators) echo 60 ;; quantization) echo 40 ;; attention) echo 80 ;; tokens) echo 80 ;;
    decode) echo 100 ;; prefill) echo 50 ;; serving) echo 120 ;; *) echo 60 ;;
  esac
}

failed=()
for part in "${parts[@]}"; do
  script=scripts/gpu_check/$part.py
  if [ ! -f "$script" ]; then
    echo "$part: there is no $script" >&2
    failed+=("$part")
    continue
  fi
  arguments=("${null[@]}" --out "$out" "${model[@]}")
  if [ "$part" = attention ]; then # has no dry mode: its kernels run in Triton's interpreter in the tests
    [ ${#null[@]} -gt 0 ] && continue
    arguments=()
  fi
  timeout --kill-after=5 "$(limit "$part")" "$python" "$script" "${arguments[@]}" 2> "$out/$part.log"
  code=$?
  if [ $code -eq 0 ]; then
    rm -f "$out/$part.log"
  else
    failed+=("$part")
    [ $code -ge 124 ] && echo "$part: stopped after $(limit "$part") s"
    tail -n 15 "$out/$part.log"
  fi
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]} (logs in $out)"
  exit 1
fi
echo "all parts passed"
