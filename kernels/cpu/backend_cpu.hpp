// The CPU backend. Activations have the layout [block][channel][row][column][lane] with kLanes
// images per block. In a last, partial block the unused lanes hold finite values that affect
// nothing: gather() and the losses fill them with zeros, so no gradient includes them.
#pragma once

#include <vector>

#include "base/clock.hpp"
#include "kernels/cpu/context.hpp"
#include "kernels/ops/backend.hpp"

namespace gyre::cpu {

class CpuBackend final : public Backend {
 public:
    explicit CpuBackend(int threads) : pool_(threads), workspace_(threads) {}

    std::string description() const override;
    std::unique_ptr<Op> make(const std::string& name, const OpSpec& spec, const OpSizes& sizes,
                             DataType type) override;
    void* allocate(std::size_t bytes) override { return allocate_aligned(bytes); }
    void release(void* memory) noexcept override { release_aligned(memory); }
    void upload(void* device, const void* host, std::size_t bytes) override;
    void download(void* host, const void* device, std::size_t bytes) override;
    void copy(void* to, const void* from, std::size_t bytes) override { upload(to, from, bytes); }
    void fill_zero(void* device, std::size_t bytes) override;
    void synchronize() override {}
    void* allocate_pinned(std::size_t bytes) override { return allocate_aligned(bytes); }
    void release_pinned(void* memory) noexcept override { release_aligned(memory); }
    Event download_async(Stream, void* host, const void* device, std::size_t bytes) override {
        download(host, device, bytes);
        return record();
    }
    Event upload_async(Stream, void* device, const void* host, std::size_t bytes) override {
        upload(device, host, bytes);
        return record();
    }
    Event submit_to_copy_stream(const std::function<void(void*)>& submit) override {
        submit(nullptr);
        return record();
    }
    void wait(Event) override {}
    void synchronize(Event) override {}
    Event record() override { return Clock::now().time_since_epoch() / kEventUnit; }
    double seconds_between(Event begin, Event end) override {
        return std::chrono::duration<double>((end - begin) * kEventUnit).count();
    }
    bool host_memory() const override { return true; }

    std::int64_t activation_elems(const Shape& shape, int n) const override {
        return shape.elems() * block_count(n) * kLanes;
    }
    void import_activation(const Shape& shape, int n, const float* host, float* x) override;
    void export_activation(const Shape& shape, int n, const float* x, float* host) override;
    void next_samples(const NextSamplesArgs& args, int n, std::int32_t* samples) override;
    void gather(const GatherArgs& args, int n, const Tensor& x, std::int32_t* y) override;

    void cross_entropy(const CrossEntropyArgs& args, int n) override;
    void sum_of_squares(std::int64_t elems, const float* x, const FiniteCheck& check,
                        ExactSum* sum) override;
    void scale_to_norm(const ClipArgs& args, std::int64_t elems, float* x) override;
    void unscale(std::int64_t elems, const LossScale* state, const FiniteCheck& check,
                 float* g) override;
    void decide_step(const LossScaleArgs& args) override { gyre::decide_step(args); }
    void add(std::int64_t elems, const float* x, float* y) override;
    void narrow(DataType type, std::int64_t elems, const float* x, std::uint16_t* y,
                const float* factor) override;
    void widen(DataType type, std::int64_t elems, const std::uint16_t* x, float* y) override;
    void round_to(DataType type, std::int64_t elems, const float* x, float* y) override;
    void update(const UpdateArgs& args, std::int64_t elems, float* p, const float* g) override;

 private:
    static constexpr std::chrono::nanoseconds kEventUnit{1};

    ThreadPool pool_;
    Workspace workspace_;
    const Context context_{pool_, workspace_};
    std::vector<ExactSum> sums_;  // of sum_of_squares(); a member to reuse its memory
};

}  // namespace gyre::cpu
