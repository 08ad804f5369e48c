#!/bin/sh
# Creates or updates the virtual environment of SGLang workers; a second run does nothing.
#
#   deploy/sglang/venv.sh [--handoff] [FOLDER]     by default .venv-sglang; PYTHON: the interpreter
#
# On a machine without an NVIDIA driver it installs the CPU set of requirements/sglang-cpu.txt and
# the platform package of this repository (about 3 GB, two minutes); torch must come from an index
# with CPU builds, or it installs unused CUDA libraries (PIP_EXTRA_INDEX_URL names one).
# On a CUDA machine it installs SGLang with its own pins. SGLANG_KIND, cpu or cuda, chooses for another
# machine. KVMesh's requirements follow in both cases; what SGLang has pinned already keeps SGLang's
# version.
# The transfer engine of prefill and decode links libibverbs.so.1 and libnuma.so.1, which root
# installs by apt here. With --handoff they are required.
#
# Exit status 75, and a line that begins with SKIPPED, if this machine cannot run it: too little disk
# or memory, or missing libraries. Other failures have another status.
set -eu

cd "$(dirname "$0")/../.."
needs_handoff=no
if [ "${1:-}" = --handoff ]; then needs_handoff=yes && shift; fi
venv=${1:-.venv-sglang}
sglang=0.5.23
mooncake=0.3.13.post1
nixl=1.5.1

kind=${SGLANG_KIND:-}
if [ -z "$kind" ]; then
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then kind=cuda; else kind=cpu; fi
fi
case $kind in cpu | cuda) ;; *) echo "SGLANG_KIND is '$kind', must be cpu or cuda" >&2 && exit 1 ;; esac

skip() {
    echo "SKIPPED: $*"
    exit 75
}

have_libraries() {
    for library in libibverbs.so.1 libnuma.so.1; do
        PATH="$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null | grep -q "$library" || return 1
    done
}

get_libraries() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 1
    echo "installing libibverbs1 and libnuma1 ..."
    set -- -qq -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3
    apt-get "$@" update >/dev/null || true # the present package lists may suffice
    DEBIAN_FRONTEND=noninteractive apt-get "$@" install -y --no-install-recommends \
        libibverbs1 libnuma1 >/dev/null || return 1
    have_libraries
}

if ! have_libraries && ! get_libraries; then
    reason="libibverbs.so.1 or libnuma.so.1 is missing, so SGLang's prefill and decode cannot start"
    [ $needs_handoff = no ] || skip "$reason"
    echo "warning: $reason; on Debian: apt-get install -y --no-install-recommends" \
        "libibverbs1 libnuma1" >&2
fi
# The tests run three engines at once. A container's limit may be below the host's memory.
memory_gb=$(awk '/^MemAvailable:/ {print int($2 / 1000000)}' /proc/meminfo 2>/dev/null || true)
group=/sys/fs/cgroup
if [ -r $group/memory.max ] && [ "$(cat $group/memory.max)" != max ]; then
    allowed_gb=$((($(cat $group/memory.max) - $(cat $group/memory.current)) / 1000000000))
    [ "${memory_gb:-99}" -le $allowed_gb ] || memory_gb=$allowed_gb
fi
if [ $needs_handoff = yes ] && [ "${memory_gb:-99}" -lt 6 ]; then
    skip "$memory_gb GB of memory are free; SGLang's engines need 6"
fi

# Two runs install one after the other.
exec 9<requirements/runtime.txt
flock 9

# The inputs of the installation; a change of any of them installs again.
stamp=$({
    echo "$kind $sglang $mooncake $nixl"
    find deploy/sglang/venv.sh requirements deploy/sglang/cpu_platform -type f \
        ! -path '*/build/*' ! -path '*.egg-info/*' ! -path '*__pycache__*' | sort | xargs sha256sum
} | sha256sum)
if [ -f "$venv/.kvmesh" ] && [ "$(cat "$venv/.kvmesh")" = "$stamp" ]; then exit 0; fi

disk_gb=$(df -Pk . | awk 'END {print int($4 / 1000000)}')
[ "$disk_gb" -ge 8 ] || skip "$disk_gb GB of disk are free; SGLang and torch need 8 to install"

echo "installing SGLang $sglang ($kind) into $venv ..."
"${PYTHON:-python3.11}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "KVMesh needs Python 3.11 or newer as '${PYTHON:-python3.11}'" >&2
    exit 1
}
[ -x "$venv/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$venv"
pip() {
    for pause_s in 5 20 0; do
        "$venv/bin/python" -m pip "$@" -q --no-compile --disable-pip-version-check --retries 5 \
            --timeout 60 &&
            return 0
        [ $pause_s = 0 ] || { echo "pip failed; retry in $pause_s s" >&2 && sleep $pause_s; }
    done
    return 1
}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT INT TERM

if [ "$kind" = cpu ]; then
    pip install -r requirements/sglang-cpu.txt
    pip install --no-deps "sglang==$sglang" "mooncake-transfer-engine-non-cuda==$mooncake"
    cp -r deploy/sglang/cpu_platform "$scratch/platform" # a build leaves folders beside its sources
    pip install --no-deps --force-reinstall "$scratch/platform"
else
    # SGLang's own pins are of CUDA 13. The package `nixl` requires its parts for CUDA 12 too.
    pip install "sglang==$sglang" "mooncake-transfer-engine-cuda13==$mooncake"
    pip install --no-deps "nixl==$nixl" "nixl-cu13==$nixl"
fi

# The pins of KVMesh and of the test tools, except for packages that are already installed.
"$venv/bin/python" - "$scratch/rest.txt" <<'PYTHON'
import re
import sys
from importlib.metadata import distributions
from pathlib import Path

here = {re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower() for one in distributions()}
tools = (
    *("attrs", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py"),
    *("execnet", "iniconfig", "pluggy", "pytest", "pytest-asyncio"),
    *("pytest-rerunfailures", "pytest-timeout", "pytest-xdist"),
)


def pins(name):
    text = Path("requirements", name).read_text().replace("\\\n", " ")
    for line in text.splitlines():
        found = re.match(r"([A-Za-z0-9._-]+)==", line)
        if found:
            yield re.sub(r"[-_.]+", "-", found[1]).lower(), line


required = dict(pins("runtime.txt"))
required |= {name: line for name, line in pins("dev.txt") if name in tools}
rest = [line for name, line in sorted(required.items()) if name not in here]
Path(sys.argv[1]).write_text("\n".join(rest) + "\n")
PYTHON
pip install --no-deps --require-hashes -r "$scratch/rest.txt"
# pip would compile all modules on one processor. Some packages have files that no Python 3 reads.
"$venv/bin/python" -m compileall -qq -j 0 "$venv/lib" || true
echo "$stamp" >"$venv/.kvmesh"
