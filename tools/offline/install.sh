#!/usr/bin/env bash
# On the GPU machine, in this checkout: `install.sh PART...` keeps parts that collect.sh has made (DEST/00, DEST/01, ...),
# in any number of calls. `install.sh --unpack DEST/SHA256` checks and unpacks them, and makes an environment of them, this
# checkout and the machine's own packages: ~/opset-offline/bin/python. It then prints the variables that engines need.
set -euo pipefail
kept=$HOME/opset-parts site=$HOME/opset-site env=$HOME/opset-offline
mkdir -p "$kept" "$site"
if [ "$1" != --unpack ]; then
    for part in "$@"; do cp "$part"/part.* "$kept/"; done
    echo "$(find "$kept" -name 'part.*' | wc -l) parts"
    exit
fi
sums=$(realpath "$2")
(cd "$kept" && sha256sum --quiet -c "$sums")
if command -v xz >/dev/null; then
    cat "$kept"/part.* | xz -dc -T0 | tar -C "$site" -xf -
else
    cat "$kept"/part.* | python3 -c "import sys, tarfile; tarfile.open(fileobj=sys.stdin.buffer, mode='r|xz').extractall(sys.argv[1], filter='data')" "$site"
fi
system=$(python3 -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")
python3 -m venv --without-pip "$env"
packages=$("$env/bin/python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")
# What was carried comes before the machine's own packages, which hold CUDA's libraries.
printf '%s\n%s\nimport site; site.addsitedir("%s")\n' "$site" "$PWD" "$system" >"$packages/opset.pth"
"$env/bin/python" -m compileall -q -j 0 "$site" >/dev/null 2>&1 || true # without bytecode, vLLM takes minutes to start
export LD_PRELOAD=$site/nccl_stubs.so
"$env/bin/python" -c "import torch, triton, vllm, vllm_opset; print(torch.__version__, triton.__version__, vllm.__version__, torch.cuda.get_device_name())"
echo "export LD_PRELOAD=$LD_PRELOAD HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0"
