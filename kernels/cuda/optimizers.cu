// Optimizer steps over the flat buffers, in one pass.
//   SGD:  d = g + decay p;  v = momentum v + d;  p -= lr (nesterov ? d + momentum v : v)
//   Adam: d = g + decay p;  m = beta1 m + (1 - beta1) d;  v = beta2 v + (1 - beta2) d^2
//         p -= lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + epsilon); AdamW shrinks p first by
//         1 - lr decay and has no decay in d
//
// Memory-bound. Bytes an element: SGD 12 (read p, g; write p), with momentum 20; Adam 28. FLOPs: 4,
// 8 and 14. One thread to 4 elements (16-byte accesses). What is the same for all elements is
// computed once, on the host; what of it changes from step to step is read from the device's memory
// (StepScalars). kSkips: whether an update may be skipped (LossScale). A gradient that is not
// finite is reported on the way (FiniteCheck).
#include <type_traits>

#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/optimizers.cuh"

namespace gyre::SIMT_NAMESPACE {
namespace {

// elems: without the gap's.
template <bool kSkips, typename Update>
__global__ void update_kernel(std::int64_t elems, Update update, UpdateGap gap, const float* g) {
    if (kSkips && *update.a.skip != 0) {
        return;
    }
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

void start(const Context& context, const UpdateArgs& rule, const UpdateGap& gap, std::int64_t elems,
           float* p, const float* g) {
    with_update(rule, p, 0, [&](const auto& update) {
        using Update = std::remove_cvref_t<decltype(update)>;
        launch_elementwise(
            Update::kName,
            update.a.skip == nullptr ? update_kernel<false, Update> : update_kernel<true, Update>,
            context, elems - gap.elems, update, gap, g);
    });
}

}  // namespace

void sgd_step(const Context& context, const SgdArgs& args, std::int64_t elems, float* p,
              const float* g, float* velocity) {
    start(context, {.sgd = &args, .first = velocity}, args.gap, elems, p, g);
}

void adam_step(const Context& context, const AdamArgs& args, std::int64_t elems, float* p,
               const float* g, float* m, float* v) {
    start(context, {.adam = &args, .first = m, .second = v}, args.gap, elems, p, g);
}

}  // namespace gyre::SIMT_NAMESPACE
