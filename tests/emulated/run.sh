#!/bin/bash
# Runs the kernels and the table of operations on a processor that is not there:
#
#     sudo tests/emulated/run.sh neon|sve256|sve512|power9 [ARGUMENTS OF PYTEST]
#
# On Debian with qemu-user-static, debootstrap and gcc-aarch64-linux-gnu, or g++-powerpc64le-linux-gnu.  Python and its
# packages are those of the other processor and run in qemu; the compiler of kernels is a cross compiler and does not.
# Tests that start another Python are left out.  SVE code is for any length of vectors, as -march=native makes it.  Without SME, with which OpenBLAS computes NaN in qemu 7.2.  20 to 40 minutes each.  EMULATED: the folder for files of the system.
set -euo pipefail
name=${1:?neon, sve256, sve512 or power9}
shift
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${EMULATED:-/var/tmp/meshmpi-emulated}
python=${PYTHON:-python3}
case $name in
    neon)   arch=arm64 cpu=neoverse-n1 flags="-march=armv8.2-a" ;;
    sve256) arch=arm64 cpu=max,sme=off,sve256=on,sve-default-vector-length=32 flags="-march=armv8.2-a+sve" ;;
    sve512) arch=arm64 cpu=max,sme=off,sve512=on,sve-default-vector-length=64 flags="-march=armv8.2-a+sve" ;;
    power9) arch=ppc64el cpu=power9 flags="-mcpu=power9" ;;
    *) echo "there is no $name" >&2; exit 2 ;;
esac
if [ $arch = arm64 ]; then
    qemu=aarch64 triple=aarch64-linux-gnu wheels="manylinux2014_aarch64 manylinux_2_27_aarch64 manylinux_2_28_aarch64"
else
    qemu=ppc64le triple=powerpc64le-linux-gnu wheels="manylinux2014_ppc64le manylinux_2_17_ppc64le manylinux_2_28_ppc64le"
fi
system=$folder/$arch packages=$folder/packages-$arch

if [ ! -e "$folder/$arch.ready" ]; then
    rm -rf "$system" "$packages"
    mkdir -p "$folder"
    more=$([ $arch = arm64 ] || echo ,python3-numpy,libopenblas0-pthread,libpython3.11-dev)
    debootstrap --foreign --variant=minbase --arch=$arch --include=python3,libgomp1,libstdc++6$more bookworm "$system"
    for package in "$system"/var/cache/apt/archives/*.deb; do dpkg-deb -x "$package" "$system"; done
    # The loader of POWER is a link that begins at the root, which here is another system's.
    [ $arch = arm64 ] || ln -sfn ../lib/$triple/ld64.so.2 "$system/lib64/ld64.so.2"
    wanted="opt_einsum threadpoolctl safetensors xxhash pydantic pytest pytest-mpi hypothesis tomli"
    [ $arch = arm64 ] && wanted="$wanted ml_dtypes numpy<2.4"
    # shellcheck disable=SC2086
    "$python" -m pip install -q --target "$packages" --only-binary=:all: --implementation cp --python-version 3.11 \
        $(printf -- '--platform %s ' $wheels) $wanted
    if [ $arch = ppc64el ]; then  # has no wheel of ml_dtypes
        source=$(mktemp -d)
        "$python" -m pip download -q --no-deps --no-binary ml_dtypes -d "$source" ml_dtypes==0.5.3
        tar xf "$source"/*.tar.gz -C "$source" --strip-components=1
        cp -r "$source/ml_dtypes" "$packages/"
        include=$system/usr/include
        $triple-g++ -std=c++17 -O1 -fPIC -shared -DEIGEN_MPL2_ONLY -fvisibility=hidden -ftrapping-math \
            -I"$source" -I"$source/ml_dtypes" -I"$source/third_party/eigen" -I"$include/python3.11" -I"$include" \
            -I"$system/usr/lib/python3/dist-packages/numpy/core/include" \
            "$source"/ml_dtypes/_src/{dtypes,numpy}.cc -o "$packages/ml_dtypes/_ml_dtypes_ext.cpython-311-$triple.so"
    fi
    touch "$folder/$arch.ready"
fi

cd "$root"
exec qemu-$qemu-static -cpu $cpu -L "$system" \
    -E PYTHONPATH="$root:$packages" -E PYTHONDONTWRITEBYTECODE=1 \
    -E LD_LIBRARY_PATH=/usr/lib/$triple/openblas-pthread:/lib/$triple -E OMP_NUM_THREADS=1 -E OPENBLAS_NUM_THREADS=1 \
    -E MESHMPI_CACHE="$folder/cache-$name" -E MESHMPI_CC="$triple-gcc $flags" \
    "$system/usr/bin/python3.11" -m pytest -q -p no:cacheprovider -m "not matrix" \
    --deselect tests/kernels/test_native_programs.py::test_results_do_not_depend_on_the_number_of_threads \
    --deselect tests/kernels/test_product_choice.py::test_one_rank_of_a_host_measures_for_all \
    --ignore tests/kernels/test_native_cache.py tests/kernels tests/ops tests/kinds "$@"
