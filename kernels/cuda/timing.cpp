#include "kernels/cuda/timing.hpp"

#include <algorithm>
#include <random>
#include <vector>

#include "base/error.hpp"

namespace gyre::SIMT_NAMESPACE {
namespace {

float* random_values(Stream& stream, std::int64_t elems) {
    std::vector<float> values(static_cast<std::size_t>(std::min<std::int64_t>(elems, 1 << 16)));
    std::minstd_rand generator(1);
    std::uniform_real_distribution<float> distribution(-1.0f, 1.0f);
    std::generate(values.begin(), values.end(), [&] { return distribution(generator); });

    const std::size_t bytes = static_cast<std::size_t>(elems) * sizeof(float);
    char* memory = static_cast<char*>(allocate(std::max(bytes, sizeof(float))));
    try {
        std::size_t filled = values.size() * sizeof(float);
        stream.upload(memory, values.data(), filled);
        while (filled < bytes) {
            const std::size_t part = std::min(filled, bytes - filled);
            stream.copy(memory + filled, memory, part);
            filled += part;
        }
        stream.synchronize();
    } catch (...) {
        release(memory);
        throw;
    }
    return reinterpret_cast<float*>(memory);
}

}  // namespace

TimingOperand::TimingOperand(Stream& stream, std::int64_t elems)
    : memory_(random_values(stream, elems)) {}

Calls::Calls(Stream& stream, Body body, int calls, bool graph)
    : stream_(stream), body_(std::move(body)), calls_(calls) {
    if (!graph) {
        return;
    }
    try {
        graph_.emplace(stream, [this] { run_plainly(); });
    } catch (const Error&) {
        graph_.reset();
    }
}

void Calls::run() {
    if (graph_) {
        graph_->launch(stream_);
    } else {
        run_plainly();
    }
}

void Calls::run_plainly() const {
    for (int call = 0; call < calls_; ++call) {
        body_(call);
    }
}

double Stopwatch::microseconds(const std::function<void()>& work) {
    stream_.record(start_);
    work();
    stream_.record(end_);
    end_.synchronize();
    return 1e3 * double{Event::milliseconds(start_, end_)};
}

}  // namespace gyre::SIMT_NAMESPACE
