#include "tests/emulation/planted_profiles.hpp"

#include "kernels/emulation/simt.hpp"

namespace simt {
namespace {

__global__ void strided(int stride, const float* x, float* y) {
    y[threadIdx.x] = x[stride * static_cast<int>(threadIdx.x)];
}

__global__ void quads(const float* x, float* y) {
    store_vector(y + threadIdx.x * 4, load_vector<float4>(x + threadIdx.x * 4));
}

__global__ void some_lanes(int lanes, const float* x, float* y) {
    if (static_cast<int>(threadIdx.x) < lanes) {
        y[threadIdx.x] = x[threadIdx.x];
    }
}

__global__ void uneven(const float* x, float* y) {
    float sum = 0.0f;
    for (unsigned i = 0; i <= threadIdx.x; ++i) {
        sum += x[i];
    }
    y[threadIdx.x] = sum;
}

template <int kPad>
__global__ void column(float* y) {
    SIMT_SHARED(float, tile, [32][32 + kPad]);
    for (int row = 0; row < 32; ++row) {
        tile[row][threadIdx.x] = 1.0f;
    }
    __syncthreads();
    y[threadIdx.x] = tile[threadIdx.x][3];
}

__global__ void broadcast(float* y) {
    SIMT_SHARED(float, tile, [32]);
    tile[threadIdx.x] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = tile[5];
}

__global__ void shared_quads(int stride, float* y) {
    SIMT_SHARED(float, tile, [32 * 8]);
    for (unsigned i = threadIdx.x; i < 32 * 8; i += 32) {
        tile[i] = 1.0f;
    }
    __syncthreads();
    store_vector(y + threadIdx.x * 4,
                 load_vector<float4>(tile + static_cast<int>(threadIdx.x) * stride));
}

__global__ void arithmetic(int times, const float* x, float* y) {
    float value = x[threadIdx.x];
    for (int i = 0; i < times; ++i) {
        value = value * 0.5f + 1.0f;
    }
    y[threadIdx.x] = value / (x[threadIdx.x] + 3.0f);
}

__global__ void few_warps(int warps, int times, const float* x, float* y) {
    __syncthreads();
    float sum = 0.0f;
    if (static_cast<int>(threadIdx.x) / 32 < warps) {
        for (int i = 0; i < times; ++i) {
            sum += x[i];
        }
    }
    __syncthreads();
    y[threadIdx.x] = sum;
    __syncthreads();
}

__global__ void products(float* y) {
    float d[4] = {};
    const std::uint32_t a[4] = {}, b[2] = {};
    for (int i = 0; i < 3; ++i) {
        mma_tf32(d, a, b);
    }
    y[threadIdx.x] = d[0];
}

// Each thread reads one word of the other block, `stride` words apart.
__global__ void remote_reads(int stride, float* y) {
    SIMT_SHARED(float, tile, [32 * 8]);
    for (unsigned i = threadIdx.x; i < 32 * 8; i += 32) {
        tile[i] = 1.0f;
    }
    cluster_sync();
    const float* const other = map_shared_rank(tile, 1 - cluster_rank());
    y[blockIdx.x * 32 + threadIdx.x] = other[stride * static_cast<int>(threadIdx.x)];
    cluster_sync();
}

__global__ void shared_reads(const float* x, float* y) {
    float sum = 0.0f;
    for (unsigned i = threadIdx.x; i < 1024; i += 256) {
        sum += x[i];
    }
    y[blockIdx.x * 256 + threadIdx.x] = sum;
}

}  // namespace

void start_strided(Stream& stream, int stride, const float* x, float* y) {
    launch("strided", strided, dim3(1), dim3(32), stream, stride, x, y);
}
void start_quads(Stream& stream, const float* x, float* y) {
    launch("quads", quads, dim3(1), dim3(32), stream, x, y);
}
void start_some_lanes(Stream& stream, int lanes, const float* x, float* y) {
    launch("some_lanes", some_lanes, dim3(1), dim3(32), stream, lanes, x, y);
}
void start_uneven(Stream& stream, const float* x, float* y) {
    launch("uneven", uneven, dim3(1), dim3(32), stream, x, y);
}
void start_column(Stream& stream, int pad, float* y) {
    const auto kernel = pad == 0   ? column<0>
                        : pad == 1 ? column<1>
                        : pad == 4 ? column<4>
                                   : column<8>;
    launch("column", kernel, dim3(1), dim3(32), stream, y);
}
void start_broadcast(Stream& stream, float* y) {
    launch("broadcast", broadcast, dim3(1), dim3(32), stream, y);
}
void start_shared_quads(Stream& stream, int stride, float* y) {
    launch("shared_quads", shared_quads, dim3(1), dim3(32), stream, stride, y);
}
void start_arithmetic(Stream& stream, int times, const float* x, float* y) {
    launch("arithmetic", arithmetic, dim3(2), dim3(64), stream, times, x, y);
}
void start_few_warps(Stream& stream, int warps, int times, const float* x, float* y) {
    launch("few_warps", few_warps, dim3(2), dim3(256), stream, warps, times, x, y);
}
void start_mma(Stream& stream, float* y) {
    launch("products", products, dim3(1), dim3(64), stream, y);
}
void start_remote_reads(Stream& stream, int stride, float* y) {
    launch("remote_reads", remote_reads, dim3(4), dim3(32), SharedBytes{}, ClusterBlocks{2}, stream,
           stride, y);
}
void start_shared_reads(Stream& stream, int blocks, const float* x, float* y) {
    launch("shared_reads", shared_reads, dim3(static_cast<unsigned>(blocks)), dim3(256), stream, x,
           y);
}

}  // namespace simt
