#!/usr/bin/env bash
# Cross-compiles the CPU kernels and what a training needs for AArch64 (Neon), and runs a selection of their tests under
# qemu-user.
#   tests/kernels/neon.sh WORK_DIR      Exit code 77: skipped, because a compiler or qemu is missing.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$1/neon

for program in aarch64-linux-gnu-g++ qemu-aarch64; do
    if ! command -v "$program" >/dev/null; then
        echo "skipped: no $program (Debian: g++-aarch64-linux-gnu, qemu-user)"
        exit 77
    fi
done
unset GYRE_CPU # names a set of this machine's
cache=
if command -v ccache >/dev/null; then
    cache=scripts/compiler-cache.sh
fi
mkdir -p "$work"
flags=(-std=c++20 -Wall -Wextra -Werror -Wno-psabi -I. -DFMT_HEADER_ONLY)
kernels=(-O2 -fno-math-errno -fno-trapping-math -ffp-contract=off -DGYRE_CPU_KERNELS=gyre_cpu_neon
    '-DGYRE_CPU_NAME="neon"' '-DGYRE_CPU_TITLE="Neon"' '-DGYRE_CPU_SETS=X(neon)')
for source in kernels/cpu/*.cpp kernels/choose_cpu_kernels.cpp kernels/make_backend.cpp; do
    printf '%s\0' "${kernels[*]@Q} -c $source -o $work/$(basename "$source").o"
done >"$work/jobs"
for source in support/{main,catch,backends} kernels/{neon_stub,kernels_test,portable_bits_test,products_test,norm_test,join_pool_test,update_kernels_test}; do
    printf '%s\0' "-O1 -c tests/$source.cpp -o $work/$(basename "$source").o"
done >>"$work/jobs"
# A session of a training, without files, ranks and flags: a source for each folder.
session=(
    comm/{bucket_plan,communicator,gradient_route,reducer,step_times,term_sums}
    data/{decompress,pixels,sampler}
    model/{fuse,graph,import,init,layers,layout,memory_plan,net,net_memory,net_parameters,spec,whiten,whole_file}
    train/{augment,bucket_table,evaluator,factors,graph_cache,hash,images,initial_weights,interrupt,launch_queue,micro_batches,nearest,optimizer}
    train/{parameter_groups,plan,run_spec,schedule,session,setting,step_program,threads,trace,trainer})
for folder in comm data model train; do
    printf '#include "%s.cpp"\n' $(printf '%s\n' "${session[@]}" | grep "^$folder/") >"$work/$folder.cpp"
    printf '%s\0' "-O1 -ffp-contract=off -ffunction-sections -c $work/$folder.cpp -o $work/$folder.o" >>"$work/jobs"
done
for source in kernels/ops/converted_op tests/train/portable_training_test; do
    printf '%s\0' "-O1 -ffp-contract=off -c $source.cpp -o $work/$(basename $source).o" >>"$work/jobs"
done
xargs -0 -P 2 -I '{}' sh -c "$cache aarch64-linux-gnu-g++ ${flags[*]} {}" <"$work/jobs"
aarch64-linux-gnu-g++ -static -Wl,--gc-sections -o "$work/tests" "$work"/*.o -lpthread
GYRE_TEST_BACKENDS=cpu qemu-aarch64 "$work/tests" \
    "conv2d*,linear*,operations*,max-pooling*,ReLU*,batch normalisation*,average*,gradients*,optimisers*,the sum of*,trainings*"
