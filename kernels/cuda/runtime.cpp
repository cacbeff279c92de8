// Memory, streams and events of a real GPU, over the CUDA runtime.
#include "kernels/cuda/runtime.hpp"

#include <fmt/format.h>

#include <array>
#include <exception>

#include "base/error.hpp"
#include "base/host_name.hpp"
#include "kernels/cuda/check.hpp"
#include "kernels/cuda/native.hpp"

namespace gyre::cuda {
namespace {

const char* remedy(cudaError_t result) {
    switch (result) {
        case cudaErrorInsufficientDriver:
            return "; the driver is too old for this CUDA runtime: update it, or build gyre with "
                   "an "
                   "older toolkit (`gyre info` prints both versions)";
        case cudaErrorNoDevice:
            return "; no GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES, or use "
                   "`device` cpu";
        case cudaErrorNoKernelImageForDevice:
            return "; gyre was not built for this GPU: configure with "
                   "-DCMAKE_CUDA_ARCHITECTURES=<its compute capability, such as 90>";
        case cudaErrorMemoryAllocation:
            return "; use a smaller `batch-size` or model, or free the GPU's memory (nvidia-smi)";
        case cudaErrorIllegalAddress:
        case cudaErrorLaunchFailure:
        case cudaErrorMisalignedAddress:
            return "; this is a bug in a kernel: run again under compute-sanitizer, or with "
                   "CUDA_LAUNCH_BLOCKING=1 to see which";
        case cudaErrorStreamCaptureUnsupported:
        case cudaErrorStreamCaptureInvalidated:
        case cudaErrorStreamCaptureUnjoined:
        case cudaErrorStreamCaptureIsolation:
        case cudaErrorStreamCaptureImplicit:
        case cudaErrorCapturedEvent:
            return "; a captured step can neither wait for the device nor allocate, and must join "
                   "its streams: this is a bug in gyre or a library, `graph` off avoids it";
        case cudaErrorDevicesUnavailable:
            return "; another process uses the GPU exclusively (nvidia-smi shows its mode)";
        default:
            return "";
    }
}

}  // namespace

void check(cudaError_t result, const char* expression, const char* file, int line) {
    if (result != cudaSuccess) {
        throw Error(
            ExitCode::internal,
            fmt::format("{} failed: {} ({}, {}:{} on {}){}", expression, cudaGetErrorString(result),
                        cudaGetErrorName(result), file, line, host_name(), remedy(result)));
    }
}

void check_launch(cudaError_t result, const char* kernel) {
    if (result != cudaSuccess) {
        throw Error(ExitCode::internal,
                    fmt::format("kernel {} could not be started: {} ({}, on {}){}", kernel,
                                cudaGetErrorString(result), cudaGetErrorName(result), host_name(),
                                remedy(result)));
    }
}

struct Event::State {
    cudaEvent_t event = nullptr;
    explicit State(bool timed) {
        GYRE_CUDA_CHECK(
            cudaEventCreateWithFlags(&event, timed ? cudaEventDefault : cudaEventDisableTiming));
    }
    ~State() { cudaEventDestroy(event); }
};

Event::Event(bool timed) : state_(std::make_shared<State>(timed)) {}
Event::~Event() = default;
void Event::synchronize() const {
    GYRE_CUDA_CHECK(cudaEventSynchronize(state_->event));
}
float Event::milliseconds(const Event& start, const Event& end) {
    float value = 0.0f;
    GYRE_CUDA_CHECK(cudaEventElapsedTime(&value, start.state_->event, end.state_->event));
    return value;
}

struct Stream::State {
    cudaStream_t stream = nullptr;
    explicit State(bool urgent) {
        int least = 0, greatest = 0;
        GYRE_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
        GYRE_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                                     urgent ? greatest : least));
    }
    ~State() { cudaStreamDestroy(stream); }
};

cudaStream_t native(Stream& stream) {
    return stream.state().stream;
}

void* Stream::handle() {
    return state_->stream;
}

Stream::Stream(bool urgent) : state_(std::make_unique<State>(urgent)) {}
Stream::~Stream() = default;

void Stream::upload(void* device, const void* host, std::size_t bytes) {
    GYRE_CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, state_->stream));
}
void Stream::download(void* host, const void* device, std::size_t bytes) {
    GYRE_CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, state_->stream));
}
void Stream::copy(void* to, const void* from, std::size_t bytes) {
    GYRE_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, state_->stream));
}
void Stream::fill_zero(void* device, std::size_t bytes) {
    if (bytes > 0) {  // what has no bytes has no address either
        GYRE_CUDA_CHECK(cudaMemsetAsync(device, 0, bytes, state_->stream));
    }
}
void Stream::record(Event& event) {
    GYRE_CUDA_CHECK(cudaEventRecord(event.state_->event, state_->stream));
}
void Stream::record_in_launches(Event& event) {
    GYRE_CUDA_CHECK(
        cudaEventRecordWithFlags(event.state_->event, state_->stream, cudaEventRecordExternal));
}
void Stream::wait(const Event& event) {
    GYRE_CUDA_CHECK(cudaStreamWaitEvent(state_->stream, event.state_->event, 0));
}
void Stream::synchronize() {
    GYRE_CUDA_CHECK(cudaStreamSynchronize(state_->stream));
}

struct Graph::State {
    cudaGraphExec_t executable = nullptr;
    // If it is in flight, CUDA frees it after it has run.
    ~State() {
        if (executable != nullptr) {
            cudaGraphExecDestroy(executable);
        }
    }
};

Graph::Graph(Stream& stream, const std::function<void()>& submit)
    : state_(std::make_shared<State>()) {
    // Restrict only this thread, as threads of libraries may allocate meanwhile.
    GYRE_CUDA_CHECK(cudaStreamBeginCapture(native(stream), cudaStreamCaptureModeThreadLocal));
    std::exception_ptr failure;
    try {
        submit();
    } catch (...) {
        failure = std::current_exception();
    }
    cudaGraph_t graph = nullptr;
    const cudaError_t ended = cudaStreamEndCapture(native(stream), &graph);
    const cudaError_t made = ended == cudaSuccess && failure == nullptr
                                 ? cudaGraphInstantiate(&state_->executable, graph,
                                                        cudaGraphInstantiateFlagUseNodePriority)
                                 : ended;
    if (graph != nullptr) {
        cudaGraphDestroy(graph);
    }
    if (failure != nullptr || made != cudaSuccess) {
        cudaGetLastError();  // clear it, so that the next call does not report it
    }
    if (failure != nullptr) {
        std::rethrow_exception(failure);
    }
    check(ended, "cudaStreamEndCapture", __FILE__, __LINE__);
    check(made, "cudaGraphInstantiate", __FILE__, __LINE__);
}
Graph::~Graph() = default;

void Graph::launch(Stream& stream) {
    GYRE_CUDA_CHECK(cudaGraphLaunch(state_->executable, native(stream)));
}

void* allocate(std::size_t bytes) {
    void* memory = nullptr;
    const cudaError_t result = cudaMalloc(&memory, bytes);
    if (result == cudaErrorMemoryAllocation) {
        cudaGetLastError();  // clear it, so that the next call does not report it
        std::size_t free = 0, total = 0;
        GYRE_CUDA_CHECK(cudaMemGetInfo(&free, &total));
        throw Error(ExitCode::internal,
                    fmt::format("out of GPU memory on {}: {} MiB requested, {} of {} MiB free{}",
                                host_name(), bytes >> 20, free >> 20, total >> 20, remedy(result)));
    }
    GYRE_CUDA_CHECK(result);
    return memory;
}
void release(void* memory) noexcept {
    cudaFree(memory);  // an error here stems from an earlier call and was reported
}
void* allocate_pinned(std::size_t bytes) {
    void* memory = nullptr;
    GYRE_CUDA_CHECK(cudaMallocHost(&memory, bytes));
    return memory;
}
void release_pinned(void* memory) noexcept {
    cudaFreeHost(memory);
}

// The UUID as printed by nvidia-smi -L.
static std::string uuid_text(const cudaUUID_t& uuid) {
    std::string text = "GPU-";
    for (int i = 0; i < 16; ++i) {
        text += fmt::format("{}{:02x}", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                            static_cast<unsigned char>(uuid.bytes[i]));
    }
    return text;
}

DeviceProperties select_device(int index, bool share) {
    int driver = 0, count = 0;
    GYRE_CUDA_CHECK(cudaDriverGetVersion(&driver));
    const cudaError_t found = driver == 0 ? cudaErrorNoDevice : cudaGetDeviceCount(&count);
    if (driver == 0 || found == cudaErrorNoDevice) {
        throw usage_error(fmt::format(
            "{} has no usable GPU: {}; check nvidia-smi and CUDA_VISIBLE_DEVICES, or use `device` "
            "cpu",
            host_name(), driver == 0 ? "no NVIDIA driver is loaded" : cudaGetErrorString(found)));
    }
    GYRE_CUDA_CHECK(found);
    // A launcher may make only one GPU visible to each rank (Slurm's --gpus-per-task=1).
    if (share || count == 1) {
        index %= count;
    }
    if (index >= count) {
        throw usage_error(
            fmt::format("this rank would use GPU {}, but {} has {} (CUDA_VISIBLE_DEVICES may hide "
                        "others); start at most one rank per GPU, or add `share-gpu`",
                        index, host_name(), count));
    }
    GYRE_CUDA_CHECK(cudaSetDevice(index));
    cudaDeviceProp properties{};
    GYRE_CUDA_CHECK(cudaGetDeviceProperties(&properties, index));
    std::array<char, 32> bus_id{};
    GYRE_CUDA_CHECK(cudaDeviceGetPCIBusId(bus_id.data(), static_cast<int>(bus_id.size()), index));
    return {properties.name, properties.multiProcessorCount,
            properties.sharedMemPerBlockOptin - properties.reservedSharedMemPerBlock, bus_id.data(),
            uuid_text(properties.uuid)};
}

}  // namespace gyre::cuda
