#!/bin/sh
# The .ptx beside the sources here, by nvcc of CUDA 13.0: tests read them, so that they need no toolkit.
set -e
cd "$(dirname "$0")"
make() {
  to=$1 from=$2
  shift 2
  nvcc -std=c++17 -arch=sm_90 -ptx "$@" "$from.cu" -o "$to.ptx"
}
make reduce reduce -lineinfo
make dispatch dispatch -lineinfo
make half half
make blocks blocks
make fp8 fp8
make math math
make math_fast math -use_fast_math
# Line information names directories of the machine it was made on.
sed -i -E 's|(\.file[[:space:]]+[0-9]+[[:space:]]+)"[^"]*/([^"/]*)"|\1"\2"|' ./*.ptx
