// Timing of kernels: operands, sequences of calls, and their duration in a stream.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "kernels/cuda/runtime.hpp"

namespace gyre::SIMT_NAMESPACE {

// Device memory with varied finite values in [-1, 1), as a GPU's clock rate depends on how many
// bits change. The destructor waits for the GPU.
class TimingOperand {
 public:
    TimingOperand(Stream& stream, std::int64_t elems);
    ~TimingOperand() { release(memory_); }
    TimingOperand(const TimingOperand&) = delete;
    TimingOperand& operator=(const TimingOperand&) = delete;

    float* get() const { return memory_; }

 private:
    float* const memory_;
};

// Calls body(0), ..., body(calls - 1) in a row: on request as a graph, like a step, or one by one
// if something in them cannot be captured.
class Calls {
 public:
    using Body = std::function<void(int call)>;
    Calls(Stream& stream, Body body, int calls, bool graph = true);
    Calls(const Calls&) = delete;
    Calls& operator=(const Calls&) = delete;

    bool is_graph() const { return graph_.has_value(); }
    int count() const { return calls_; }
    void run();

 private:
    void run_plainly() const;

    Stream& stream_;
    const Body body_;
    const int calls_;
    std::optional<Graph> graph_;
};

class Stopwatch {
 public:
    explicit Stopwatch(Stream& stream) : stream_(stream) {}
    // The duration of `work` in the stream; waits for it. 0 on the emulated GPU.
    double microseconds(const std::function<void()>& work);
    // The duration of one call; runs all of them once more.
    double microseconds(Calls& calls) {
        return microseconds([&] { calls.run(); }) / calls.count();
    }

 private:
    Stream& stream_;
    Event start_, end_;
};

}  // namespace gyre::SIMT_NAMESPACE
