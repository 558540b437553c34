#!/usr/bin/env bash
# Type-check the packages laid out as they are installed (the kernels' folder has another name in the checkout):
# tools/typecheck.sh VENV
set -euo pipefail
venv=$(cd "$1" && pwd)
tree=.cache/typecheck
rm -rf "$tree"
mkdir -p "$tree"
cp -r delta_wire trl_delta vllm_delta pyproject.toml "$tree/"
cp -r triton_kernels "$tree/delta_wire/kernels"
cd "$tree"
"$venv/bin/pyright" --pythonpath "$venv/bin/python" .
