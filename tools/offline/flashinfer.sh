#!/usr/bin/env bash
# flashinfer.sh DEST: FlashInfer 0.7.2 with its sampler and its attention of random problems compiled for Hopper GPUs, as
# DEST/flashinfer.tar.xz. It takes an hour on 2 cores. On a GPU machine without a package index, unpack it into a folder and
# run Python 3.12 with
#
#     PYTHONPATH=FOLDER FLASHINFER_CUDA_ARCH_LIST=9.0a FLASHINFER_DISABLE_JIT=1
#
# FlashInfer then compiles nothing. What is not compiled here is an error there: attention in other dtypes than bf16, with
# heads of 80 and 96 or a soft cap, and top-k with one number for all rows. It needs `make env` and CUDA 13.0 in CUDA_HOME or
# /usr/local/cuda, and no GPU.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/fetch.sh"
dest=${1:?usage: flashinfer.sh DEST}
mkdir -p "$dest"
dest=$(cd "$dest" && pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
mkdir "$tmp/wheels" "$tmp/site" "$tmp/stubs"
ffi=apache-tvm-ffi==0.1.11 # which vLLM 0.33.0 pins

fetch "$tmp/wheels" flashinfer-python==0.7.2 $ffi nvidia-curand==10.4.0.35
for wheel in "$tmp"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$tmp/site"; done
# What the Python that compiles needs, which may be another one.
python3 -m pip install -q --no-deps --target "$tmp/driver" $ffi ninja nvidia-ml-py
echo | gcc -shared -x c - -o "$tmp/stubs/libcuda.so" # the driver's library, which is found when the sampler is loaded

export FLASHINFER_WORKSPACE_BASE=$tmp FLASHINFER_CUDA_ARCH_LIST=9.0a
FLASHINFER_EXTRA_CUDAFLAGS="-isystem $tmp/site/nvidia/cu13/include" FLASHINFER_EXTRA_LDFLAGS="-L$tmp/stubs" \
    CUDA_HOME=${CUDA_HOME:-/usr/local/cuda} MAX_JOBS=$(nproc) \
    PYTHONPATH=$tmp/driver:$tmp/site PATH=$tmp/driver/bin:$PATH "$here/../../.venv/bin/python" -c '
import itertools, torch
from flashinfer.jit.attention.modules import gen_batch_prefill_module
from flashinfer.jit.sampling import gen_sampling_module
gen_sampling_module().build(verbose=False)
for backend, head_size, window in itertools.product(("fa2", "fa3"), (64, 128, 256), (False, True)):
    dtypes = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32)
    gen_batch_prefill_module(backend, *dtypes, head_size, head_size, 0, window, False, False).build(verbose=False)'

# A module that lies in data/aot is loaded instead of compiled. The rest of data are sources. FlashInfer generates those of
# attention all the same, from these files.
mkdir "$tmp/csrc"
mv "$tmp"/site/flashinfer/data/csrc/batch_prefill* "$tmp/csrc/"
rm -rf "$tmp/site/flashinfer/data" "$tmp/site/nvidia"
mkdir "$tmp/site/flashinfer/data"
mv "$tmp/csrc" "$tmp/site/flashinfer/data/"
for library in $(find "$tmp/.cache" -name '*.so' -path '*/cached_ops/*'); do
    name=$(basename "$library" .so)
    mkdir -p "$tmp/site/flashinfer/data/aot/$name"
    cp "$library" "$tmp/site/flashinfer/data/aot/$name/"
done
tar -C "$tmp/site" -cJf "$dest/flashinfer.tar.xz" .
du -sm "$dest/flashinfer.tar.xz"
