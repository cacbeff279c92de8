// ReLU, dropout, log-softmax with its loss, and the optimisers on the CPU.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "kernels/cpu/backend_cpu.hpp"

namespace gyre::cpu {

namespace {

constexpr std::int64_t kRange = 1 << 15;  // small enough to share out, large enough to be cheap

bool finite(float value) {
    return std::abs(value) <= std::numeric_limits<float>::max();
}

// The last element of g[begin, end) that is not finite, if there is one.
void report_not_finite(const FiniteCheck& check, const float* g, std::int64_t begin,
                       std::int64_t end) {
    while (end > begin && finite(g[end - 1])) {
        --end;
    }
    if (end == begin || check.word == nullptr) {
        return;
    }
    const auto found =
        static_cast<std::int32_t>(1 + (check.first_elem + end - 1) / FiniteCheck::kGrain);
    std::atomic_ref<std::int32_t> word(*check.word);
    std::int32_t before = word;
    while (before < found && !word.compare_exchange_weak(before, found)) {
    }
}

}  // namespace

template <typename Body>
void CpuBackend::for_ranges(std::int64_t elems, Body&& body) {
    pool_.parallel_for((elems + kRange - 1) / kRange, [&](std::int64_t i, int) {
        body(i * kRange, std::min(elems, (i + 1) * kRange));
    });
}

void CpuBackend::relu_forward(const Shape& shape, int n, float* y) {
    for_ranges(activation_elems(shape, n), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
            y[i] = y[i] <= 0.0f ? 0.0f : y[i];  // NaN stays NaN
        }
    });
}

void CpuBackend::relu_backward(const Shape& shape, int n, const float* y, float* dy) {
    for_ranges(activation_elems(shape, n), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
            dy[i] = y[i] <= 0.0f ? 0.0f : dy[i];
        }
    });
}

void CpuBackend::dropout(const DropoutArgs& args, int n, float* x) {
    const std::int64_t plane = args.shape.plane_elems();
    const auto words =
        static_cast<std::uint32_t>(args.by_channel ? args.shape.channels : args.shape.elems());
    const std::int64_t word_elems = args.by_channel ? plane : 1;
    RandomStream stream = args.stream;
    if (args.epoch != nullptr) {
        stream.epoch = *args.epoch;
    }
    if (args.probability <= 0.0f) {
        return;
    }
    // word >= probability * 2^32, in integers.
    const auto largest_dropped =
        static_cast<std::uint32_t>(std::ceil(static_cast<double>(args.probability) * 0x1p32) - 1.0);
    const float keep = args.probability < 1.0f ? 1.0f / (1.0f - args.probability) : 0.0f;
    pool_.parallel_for(block_count(n), [&](std::int64_t block, int) {
        float* to = x + block * args.shape.elems() * kLanes;
        const int lanes = std::min(kLanes, n - static_cast<int>(block) * kLanes);
        std::uint32_t sample[kLanes] = {};
        for (int lane = 0; lane < lanes; ++lane) {
            sample[lane] = static_cast<std::uint32_t>(args.samples[block * kLanes + lane]);
        }
        for (std::uint32_t group = 0; group * 4 < words; ++group) {
            const std::uint32_t in_group = std::min(4u, words - group * 4);
            std::uint32_t word_of[4][kLanes];
            float mask[4][kLanes];
            for (int lane = 0; lane < kLanes; ++lane) {  // all lanes, so that it vectorises
                const Philox4 random = stream.group(sample[lane], group);
                for (int i = 0; i < 4; ++i) {
                    word_of[i][lane] = random.word[i];
                }
            }
            for (int i = 0; i < 4; ++i) {
                for (int lane = 0; lane < kLanes; ++lane) {
                    mask[i][lane] = word_of[i][lane] > largest_dropped ? keep : 0.0f;
                }
            }
            for (std::uint32_t i = 0; i < in_group; ++i) {
                float* word = to + (group * 4 + i) * word_elems * kLanes;
                for (std::int64_t e = 0; e < word_elems; ++e) {
                    for (int lane = 0; lane < kLanes; ++lane) {
                        word[e * kLanes + lane] *= mask[i][lane];
                    }
                }
            }
        }
    });
}

void CpuBackend::cross_entropy(const CrossEntropyArgs& args, int n) {
    double loss = 0.0;
    int correct = 0;
    for (int block = 0; block < block_count(n); ++block) {
        const std::ptrdiff_t base = std::ptrdiff_t{block} * args.classes * kLanes;
        const float* logits = args.logits + base;
        const int lanes = std::min(kLanes, n - block * kLanes);
        float largest[kLanes], sum[kLanes] = {};
        int best[kLanes] = {};
        std::copy_n(logits, kLanes, largest);
        for (int k = 1; k < args.classes; ++k) {
            for (int lane = 0; lane < kLanes; ++lane) {
                const float v = logits[k * kLanes + lane];
                best[lane] = v > largest[lane] ? k : best[lane];
                largest[lane] = v > largest[lane] ? v : largest[lane];
            }
        }
        for (int k = 0; k < args.classes; ++k) {
            for (int lane = 0; lane < kLanes; ++lane) {
                sum[lane] += std::exp(logits[k * kLanes + lane] - largest[lane]);
            }
        }
        for (int lane = 0; lane < lanes; ++lane) {
            const int label = args.labels[block * kLanes + lane];
            loss += static_cast<double>(std::log(sum[lane]) + largest[lane] -
                                        logits[label * kLanes + lane]);
            correct += best[lane] == label;
        }
        if (args.gradient != nullptr) {
            float* gradient = args.gradient + base;
            for (int k = 0; k < args.classes; ++k) {
                for (int lane = 0; lane < kLanes; ++lane) {
                    const float p = std::exp(logits[k * kLanes + lane] - largest[lane]) / sum[lane];
                    gradient[k * kLanes + lane] = lane < lanes ? args.scale * p : 0.0f;
                }
            }
            for (int lane = 0; lane < lanes; ++lane) {
                gradient[args.labels[block * kLanes + lane] * kLanes + lane] -= args.scale;
            }
        }
    }
    args.sums[0] = static_cast<float>(loss * static_cast<double>(args.scale));
    args.sums[1] = static_cast<float>(correct);
}

void CpuBackend::clip_norm(std::int64_t elems, float most, float* x, const FiniteCheck& check) {
    // One sum for each range, added in order: the same for any number of threads.
    std::vector<double> sums(static_cast<std::size_t>((elems + kRange - 1) / kRange));
    for_ranges(elems, [&](std::int64_t begin, std::int64_t end) {
        double sum = 0.0;
        for (std::int64_t i = begin; i < end; ++i) {
            sum += double{x[i]} * double{x[i]};
        }
        sums[static_cast<std::size_t>(begin / kRange)] = sum;
        if (!std::isfinite(sum)) {
            report_not_finite(check, x, begin, end);
        }
    });
    double total = 0.0;
    for (const double sum : sums) {
        total += sum;
    }
    const double ratio = double{most} / (std::sqrt(total) + 1e-6);
    if (ratio < 1.0 || std::isnan(ratio)) {
        const auto factor = static_cast<float>(ratio);
        for_ranges(elems, [=](std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i) {
                x[i] *= factor;
            }
        });
    }
}

void CpuBackend::add(std::int64_t elems, const float* x, float* y) {
    for_ranges(elems, [=](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
            y[i] += x[i];
        }
    });
}

void CpuBackend::narrow(DataType type, std::int64_t elems, const float* x, std::uint16_t* y) {
    for_ranges(elems, [=](std::int64_t begin, std::int64_t end) {
        if (type == DataType::bfloat16) {
            for (std::int64_t i = begin; i < end; ++i) {
                y[i] = narrow::to_bfloat16(x[i]);
            }
        } else {
            for (std::int64_t i = begin; i < end; ++i) {
                y[i] = narrow::to_float16(x[i]);
            }
        }
    });
}

void CpuBackend::widen(DataType type, std::int64_t elems, const std::uint16_t* x, float* y) {
    for_ranges(elems, [=](std::int64_t begin, std::int64_t end) {
        if (type == DataType::bfloat16) {
            for (std::int64_t i = begin; i < end; ++i) {
                y[i] = narrow::from_bfloat16(x[i]);
            }
        } else {
            for (std::int64_t i = begin; i < end; ++i) {
                y[i] = narrow::from_float16(x[i]);
            }
        }
    });
}

void CpuBackend::sgd_step(const SgdArgs& args, std::int64_t elems, float* p, const float* g,
                          float* velocity) {
    const SgdArgs a = args;
    const float rate = args.scalars->learning_rate;
    for_ranges(elems, [=](std::int64_t begin, std::int64_t end) {
        int all_finite = 1;
        if (velocity == nullptr) {
            for (std::int64_t i = begin; i < end; ++i) {
                all_finite &= finite(g[i]);
                p[i] -= rate * (g[i] + a.weight_decay * p[i]);
            }
        } else {
            for (std::int64_t i = begin; i < end; ++i) {
                all_finite &= finite(g[i]);
                const float d = g[i] + a.weight_decay * p[i];
                velocity[i] = a.momentum * velocity[i] + d;
                p[i] -= rate * (a.nesterov ? d + a.momentum * velocity[i] : velocity[i]);
            }
        }
        if (all_finite == 0) {
            report_not_finite(a.finite, g, begin, end);
        }
    });
}

void CpuBackend::adam_step(const AdamArgs& args, std::int64_t elems, float* p, const float* g,
                           float* m, float* v) {
    const AdamArgs a = args;
    const StepScalars s = *args.scalars;
    // Captured by value: constants behind a reference might be changed by the stores.
    for_ranges(elems, [=](std::int64_t begin, std::int64_t end) {
        int all_finite = 1;
        for (std::int64_t i = begin; i < end; ++i) {
            all_finite &= finite(g[i]);
            const float d = g[i] + a.weight_decay * p[i];
            const float m_new = a.beta1 * m[i] + (1.0f - a.beta1) * d;
            const float v_new = a.beta2 * v[i] + (1.0f - a.beta2) * d * d;
            p[i] = p[i] * s.adam_shrink -
                   s.adam_step_size * m_new / (std::sqrt(v_new) * s.adam_correction + a.epsilon);
            m[i] = m_new;
            v[i] = v_new;
        }
        if (all_finite == 0) {
            report_not_finite(a.finite, g, begin, end);
        }
    });
}

}  // namespace gyre::cpu
