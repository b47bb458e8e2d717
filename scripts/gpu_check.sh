#!/usr/bin/env bash
# Checks the GPU path on this machine: right, then fast. From the plain source tree, nothing is installed.
#
#   scripts/gpu_check.sh [--null] [--wheels DIR] [--model PATH] [--out DIR] [--cache DIR] [PART...]
#   scripts/gpu_check.sh --precompile ARCH --cache DIR      fills the cache for a GPU that is elsewhere (80, 90, 100)
#
# --null    dry run on the CPU with a tiny model: the same code, no measurement worth anything, and three times the time
# --wheels  folder with wheels of pure-Python dependencies that the machine lacks
# --model   a small real model (directory or GGUF file) whose tokens are compared with the CPU's
# --cache   where Triton keeps compiled kernels; one that was filled elsewhere by the same Triton saves precompiling
# PART      machine precompile operators attention decode breakdown quantization prefill tokens serving tail; all if none is named
#
# Each part has a time limit of its own, together under nine minutes, and a part that fails does not stop the others.
# What decides most comes first. Results: a table here, OUT/PART.jsonl with a line for each row as soon as it is known
# (so of a part that was stopped too), OUT/PART.json for each part that ended, OUT/PART.log where it failed.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
[ -x .venv/bin/python ] && python=${PYTHON:-.venv/bin/python}
null=() wheels=() model=() out=gpu_check_results parts=() arch=
while [ $# -gt 0 ]; do
  case "$1" in
    --null) null=(--null) ;;
    --wheels) wheels=("$2"); shift ;;
    --model) model=(--model "$2"); shift ;;
    --out) out=$2; shift ;;
    --cache) mkdir -p "$2" && TRITON_CACHE_DIR=$(cd "$2" && pwd) && export TRITON_CACHE_DIR; shift ;;
    --precompile) arch=$2; shift ;;
    --*) echo "unknown option $1; see the head of $0" >&2; exit 2 ;;
    *) parts+=("$1") ;;
  esac
  shift
done
[ ${#parts[@]} -eq 0 ] && parts=(machine precompile operators attention decode breakdown quantization prefill tokens serving tail)

tree=$("$python" scripts/gpu_check/plain_tree.py "${wheels[@]}") || exit 1
export PYTHONPATH="$tree:scripts/gpu_check${PYTHONPATH:+:$PYTHONPATH}"
export TOKENIZERS_PARALLELISM=false
if [ -n "$arch" ]; then
  exec "$python" scripts/gpu_check/precompile.py --arch "$arch"
fi
mkdir -p "$out"

limit() { # seconds that a part may take
  case "$1" in
    machine) echo 20 ;; precompile) echo 45 ;; operators) echo 40 ;; attention) echo 50 ;; breakdown) echo 30 ;; decode) echo 60 ;;
    quantization) echo 40 ;; prefill) echo 30 ;; tokens) echo 90 ;; serving) echo 100 ;; tail) echo 30 ;; *) echo 60 ;;
  esac
}

failed=()
for part in "${parts[@]}"; do
  script=scripts/gpu_check/$part.py
  arguments=("${null[@]}" --out "$out" "${model[@]}") lines=/dev/null # these parts write their rows themselves
  case "$part" in
    precompile) arguments=("${null[@]}") lines=$out/$part.jsonl ;;
    attention | tail) # have no dry mode: their kernels run in Triton's interpreter in the tests
      [ ${#null[@]} -gt 0 ] && continue
      script=scripts/gpu_check/attention.py arguments=() lines=$out/$part.jsonl
      [ "$part" = tail ] && arguments=(--tail) ;;
  esac
  if [ ! -f "$script" ]; then
    echo "$part: there is no $script" >&2
    failed+=("$part")
    continue
  fi
  seconds=$(($(limit "$part") * (${#null[@]} > 0 ? 3 : 1)))
  timeout --kill-after=5 "$seconds" "$python" "$script" "${arguments[@]}" 2> "$out/$part.log" |
    tee >(grep --line-buffered '^{' > "$lines")
  code=${PIPESTATUS[0]}
  if [ $code -eq 0 ]; then
    rm -f "$out/$part.log"
  else
    failed+=("$part")
    [ $code -ge 124 ] && echo "$part: stopped after $seconds s"
    tail -n 15 "$out/$part.log"
  fi
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]} (logs in $out)"
  exit 1
fi
echo "all parts passed"
