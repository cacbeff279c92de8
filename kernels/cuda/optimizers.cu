// Optimizer steps over the flat buffers, in one pass. Formulas: kernels/ops/update_rules.hpp.
//
// Memory-bound. Bytes an element: 12 (read p, g; write p) and 8 for each state. FLOPs: 4 to 14. One
// thread to 4 elements (16-byte accesses). What changes from step to step is read from the device's
// memory (StepScalars). kSkips: whether an update may be skipped (LossScale). A gradient that is
// not finite is reported on the way (FiniteCheck).
#include <type_traits>

#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/optimizers.cuh"

namespace gyre::SIMT_NAMESPACE {
namespace {

// elems: without the gap's.
template <bool kSkips, typename Update>
__global__ void update_kernel(std::int64_t elems, Update update, const float* g) {
    if (kSkips && *update.a.skip != 0) {
        return;
    }
    const UpdateGap gap = update.a.gap;
    const auto behind_gap = [=](std::int64_t i) { return i < gap.begin ? i : i + gap.elems; };
    for_my_quad(
        elems,
        [=](std::int64_t of_all) {
            const std::int64_t i = behind_gap(of_all);
            typename Update::Quad quad = update.load(i);
            update.compute(i, load4(g + i), quad);
            update.store(i, quad);
        },
        [=](std::int64_t of_all) {
            const std::int64_t i = behind_gap(of_all);
            update(i, g[i]);
        });
}

}  // namespace

void update(const Context& context, const UpdateArgs& args, std::int64_t elems, float* p,
            const float* g) {
    with_update(args, p, 0, [&](const auto& by_rule) {
        using Update = std::remove_cvref_t<decltype(by_rule)>;
        launch_elementwise(
            Update::kName,
            args.skip == nullptr ? update_kernel<false, Update> : update_kernel<true, Update>,
            context, elems - args.gap.elems, by_rule, g);
    });
}

}  // namespace gyre::SIMT_NAMESPACE
