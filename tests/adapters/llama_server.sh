#!/bin/sh
# Builds llama-server in .venv-llama, from the source package that tests/adapters/llama-server.txt
# pins (ten minutes on two cores); a second run does nothing. PYTHON: the interpreter.
# It is not optimized: the compiler takes half the time, and the model of the tests is tiny.
set -eu

cd "$(dirname "$0")/../.."
folder=.venv-llama
python=${PYTHON:-python3.11}
stamp=$(cat tests/adapters/llama-server.txt tests/adapters/llama_server.sh | sha256sum)
if [ -f $folder/.ready ] && [ "$(cat $folder/.ready)" = "$stamp" ]; then exit 0; fi

for program in cmake c++; do
    command -v $program >/dev/null 2>&1 || {
        echo "llama-server needs $program; on Debian: apt-get install -y cmake g++ ninja-build" >&2
        exit 1
    }
done
generator="Unix Makefiles"
if command -v ninja >/dev/null 2>&1; then generator=Ninja; fi

echo "building llama-server in $folder (ten minutes, once) ..."
rm -rf $folder
"$python" -m venv $folder
"$folder/bin/python" -m pip download -q --disable-pip-version-check --no-deps --no-binary :all: \
    --require-hashes -d $folder/source -r tests/adapters/llama-server.txt
tar -xzf $folder/source/llama_cpp_python-*.tar.gz -C $folder/source
{
    cmake -G "$generator" -S $folder/source/llama_cpp_python-*/vendor/llama.cpp -B $folder/build \
        -DCMAKE_BUILD_TYPE=None -DCMAKE_C_FLAGS=-O1 -DCMAKE_CXX_FLAGS=-O0 \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
        -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_ALL_WARNINGS=OFF \
        -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DGGML_LLAMAFILE=OFF
    cmake --build $folder/build --target llama-server -j "$(nproc)"
} >$folder/build.log 2>&1 || {
    tail -20 $folder/build.log >&2
    exit 1
}
echo "$stamp" >$folder/.ready
