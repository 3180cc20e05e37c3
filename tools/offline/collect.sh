#!/usr/bin/env bash
# collect.sh DEST [KEPT...]: collects stock vLLM 0.33.0, with the PyTorch and the Triton that it pins, and what this
# checkout needs beside it, for a GPU machine without a package index (x86-64, Python 3.12, the CUDA 13.0 libraries of
# torch 2.11). Then take this checkout and DEST there, and call install.sh. The archive is cut into parts of 44 MB, DEST/00
# and so on, which can be taken there one by one. It takes 5 to 15 minutes on 2 cores, and 6 GB of disk meanwhile.
#
# NCCL stays the machine's own. torch 2.14 binds eleven functions that NCCL 2.28 lacks when it is loaded, so a library of
# functions that fail is loaded first. To save space, FlashAttention 2, headers, debuggers and what only other GPUs need
# are left out, and so is FlashInfer: engines need VLLM_USE_FLASHINFER_SAMPLER=0. KEPT names what is taken all the same,
# as unpack_wheels.py lists it: _vllm_fa2_C for FlashAttention 2, which stock vLLM takes for ALiBi.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dest=${1:?usage: collect.sh DEST [KEPT...]}
shift
mkdir -p "$dest"
dest=$(cd "$dest" && pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
mkdir "$tmp/wheels" "$tmp/nccl" "$tmp/site" "$tmp/extras"

source "$here/fetch.sh"
fetch "$tmp/wheels" torch==2.14.0 torchvision==0.29.0 triton==3.8.0 vllm==0.33.0 -r "$here/requirements.txt"
fetch "$tmp/nccl" nvidia-nccl-cu13==2.28.9
fetch "$tmp/extras" -r "$here/extras.txt"
mkdir "$tmp/checkout"
git -C "$here/../.." archive HEAD | tar -C "$tmp/checkout" -xf -
python3 -m pip wheel -q --no-deps -w "$tmp/extras" "$tmp/checkout"
python3 "$here/unpack_wheels.py" "$tmp" "$@"
chmod +x "$tmp"/site/triton/backends/nvidia/bin/* "$tmp"/site/torch/bin/*
strip --strip-unneeded "$tmp/site/triton/_C/libtriton.so"

nccl=$tmp/nccl/nvidia/nccl/lib/libnccl.so.2
nm -D --defined-only "$nccl" | awk '{sub(/@.*/, "", $3); print $3}' | sort -u >"$tmp/has"
nm -D --undefined-only "$tmp/site/torch/lib/libtorch_cuda.so" | awk '{sub(/@.*/, "", $2); print $2}' | grep '^nccl' | sort -u >"$tmp/wants"
comm -13 "$tmp/has" "$tmp/wants" | awk '{print "int " $1 "(void) { return 5; } /* ncclInvalidUsage */"}' >"$tmp/nccl_stubs.c"
gcc -shared -fPIC -O1 -o "$tmp/site/nccl_stubs.so" "$tmp/nccl_stubs.c"

cp -r "$tmp/extras_site/." "$tmp/site/"
tar -C "$tmp/site" -cf - . | nice xz -T2 -3 --block-size=32MiB | split -b 44M -d - "$tmp/part."
rm -rf "$dest"/[0-9][0-9]
for part in "$tmp"/part.*; do
    mkdir -p "$dest/${part##*.}"
    mv "$part" "$dest/${part##*.}/"
done
(cd "$dest" && sha256sum [0-9][0-9]/part.* | sed 's#  [0-9]*/#  #' >SHA256)
du -sm "$dest"/[0-9][0-9]
