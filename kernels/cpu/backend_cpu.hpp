// The CPU backend. Activations lie as [block][channel][row][column][lane], kLanes images to a
// block; the lanes of a last, partial block hold finite values that count for nothing: gather()
// and the losses fill them with zeros, so no gradient sees them.
#pragma once

#include <vector>

#include "kernels/backend.hpp"
#include "kernels/base/clock.hpp"
#include "kernels/cpu/simd.hpp"
#include "kernels/cpu/thread_pool.hpp"

namespace gyre::cpu {

inline int block_count(int n) {
    return (n + kLanes - 1) / kLanes;
}

// 64-byte aligned, zeroed memory; huge pages where it is large, for the sake of the TLB.
void* allocate_aligned(std::size_t bytes);
void release_aligned(void* memory) noexcept;

// Memory a kernel needs while it runs; grows to the largest request and is kept.
class Scratch {
 public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { release_aligned(memory_); }
    float* floats(std::int64_t elems);

 private:
    void* memory_ = nullptr;
    std::int64_t elems_ = 0;
};

class CpuBackend final : public Backend {
 public:
    explicit CpuBackend(int threads) : pool_(threads), worker_scratch_(workers(threads)) {}

    std::string description() const override;
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
    void gather(const GatherArgs& args, int n, float* x, std::int32_t* y) override;

    void conv2d_forward(const Conv2dShape& shape, int n, const float* x, const float* w,
                        const float* b, float* y) override;
    void conv2d_backward_data(const Conv2dShape& shape, int n, const float* dy, const float* w,
                              float* dx) override;
    void conv2d_backward_weights(const Conv2dShape& shape, int n, const float* x, const float* dy,
                                 float* dw, float* db) override;
    void maxpool2d_forward(const MaxPool2dShape& shape, int n, const float* x, float* y,
                           std::uint8_t* argmax) override;
    void maxpool2d_backward(const MaxPool2dShape& shape, int n, const float* x,
                            const std::uint8_t* argmax, const float* dy, float* dx) override;
    void relu_forward(const Shape& shape, int n, float* y) override;
    void relu_backward(const Shape& shape, int n, const float* y, float* dy) override;
    void linear_forward(const LinearShape& shape, int n, const float* x, const float* w,
                        const float* b, float* y) override;
    void linear_backward_data(const LinearShape& shape, int n, const float* dy, const float* w,
                              float* dx) override;
    void linear_backward_weights(const LinearShape& shape, int n, const float* x, const float* dy,
                                 float* dw, float* db) override;
    void dropout(const DropoutArgs& args, int n, float* x) override;
    void cross_entropy(const CrossEntropyArgs& args, int n) override;
    void clip_norm(std::int64_t elems, float most, float* x, const FiniteCheck& finite) override;
    void add(std::int64_t elems, const float* x, float* y) override;
    void narrow(DataType type, std::int64_t elems, const float* x, std::uint16_t* y) override;
    void widen(DataType type, std::int64_t elems, const std::uint16_t* x, float* y) override;
    void sgd_step(const SgdArgs& args, std::int64_t elems, float* p, const float* g,
                  float* velocity) override;
    void adam_step(const AdamArgs& args, std::int64_t elems, float* p, const float* g, float* m,
                   float* v) override;

 private:
    static constexpr std::chrono::nanoseconds kEventUnit{1};
    static std::size_t workers(int threads) { return static_cast<std::size_t>(threads); }
    // Calls body(begin, end) over pieces of [0, elems) on all threads.
    template <typename Body>
    void for_ranges(std::int64_t elems, Body&& body);

    ThreadPool pool_;
    Scratch scratch_;                      // of the whole kernel
    Scratch scratch_b_;                    // a second one, for kernels that need two
    std::vector<Scratch> worker_scratch_;  // [threads]
};

}  // namespace gyre::cpu
