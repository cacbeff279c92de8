// Kernels with planted faults and correct counterparts for tests/kernels/sass_gate.py, which
// compiles them for sm_90 and must flag exactly the figures that the `sass` lines list.
//
// budget allow planted/allowed_*: float_divisions: every thread reads its own divisor
// budget sm_90 planted/narrow_bad: narrow_global<=0
// budget sm_90 planted/narrow_good: narrow_global<=0
// budget sm_90 planted/hmma_bad: per_hmma<=12
// budget sm_90 planted/hmma_good: per_hmma<=12
// budget sm_90 planted/words_bad: ffma_per_word>=1.5
// budget sm_90 planted/words_good: ffma_per_word>=1.5
// budget sm_90 planted/long_bad: instructions<=60
// budget sm_90 planted/long_good: instructions<=60
// budget sm_90 planted/fences_bad: fences>=2
// budget sm_90 planted/fences_good: fences>=2
// budget sm_90 planted/lost_loop: per_hmma<=12
#include <cstdint>

// A local array that registers cannot hold, as its index is only known at run time.
// sass local_bad: local
extern "C" __global__ void local_bad(int n, const int* which, float* y) {
    float kept[32];
    for (int i = 0; i < 32; ++i) {
        kept[i] = y[i * n];
    }
    for (int i = 0; i < n; ++i) {
        y[i] += kept[which[i] & 31];
    }
}
// sass local_good:
extern "C" __global__ void local_good(int n, const int* which, float* y) {
    __shared__ float kept[32];
    kept[threadIdx.x & 31] = y[threadIdx.x * n];
    __syncthreads();
    for (int i = 0; i < n; ++i) {
        y[i] += kept[which[i] & 31];
    }
}

// All kinds of division in a loop: with the reciprocal hoisted or not; remainders; 64 bits; floats.
// sass divide_invariant_bad: int_divisions
extern "C" __global__ void divide_invariant_bad(int n, int width, int* y) {
    for (int i = threadIdx.x; i < n; i += 32) {
        y[i] = y[i] / width;
    }
}
// sass divide_varying_bad: int_divisions
extern "C" __global__ void divide_varying_bad(int n, const unsigned* width, unsigned* y) {
    for (int i = threadIdx.x; i < n; i += 32) {
        y[i] = y[i] / width[i];
    }
}
// sass remainder_bad: int_divisions
extern "C" __global__ void remainder_bad(int n, unsigned width, unsigned* y) {
    for (int i = threadIdx.x; i < n; i += 32) {
        y[i] = y[i] % width;
    }
}
// sass divide_wide_bad: int_divisions
extern "C" __global__ void divide_wide_bad(int n, std::int64_t width, std::int64_t* y) {
    for (int i = threadIdx.x; i < n; i += 32) {
        y[i] = y[i] / width;
    }
}
// sass divide_float_bad: float_divisions
extern "C" __global__ void divide_float_bad(int n, const float* by, float* y) {
    for (int i = threadIdx.x; i < n; i += 32) {
        y[i] = y[i] / by[i];
    }
}
// sass allowed_divide_float:
extern "C" __global__ void allowed_divide_float(int n, const float* by, float* y) {
    for (int i = threadIdx.x; i < n; i += 32) {
        y[i] = y[i] / by[i];
    }
}
// Divisions by a constant, through a multiplier from the host, and outside loops.
// sass divide_good:
extern "C" __global__ void divide_good(int n, unsigned multiplier, unsigned shift, unsigned width,
                                       unsigned* y) {
    const unsigned first = threadIdx.x / width;
    for (int i = threadIdx.x; i < n; i += 32) {
        const unsigned value = y[i], quotient = __umulhi(value, multiplier) >> shift;
        const unsigned rest = value - quotient * width;
        if (rest < 7) {
            y[i] = first + quotient + value / 7 + rest % 13;
        }
    }
}

// Scalar accesses to contiguous quads.
// sass narrow_bad: narrow_global
extern "C" __global__ void narrow_bad(int n, const float* x, float* y) {
    for (int i = threadIdx.x; i < n; i += 32) {
        y[i] = 2.0f * x[i];
    }
}
// sass narrow_good:
extern "C" __global__ void narrow_good(int n, const float4* x, float4* y) {
    for (int i = threadIdx.x; i < n; i += 32) {
        const float4 v = x[i];
        y[i] = make_float4(2.0f * v.x, 2.0f * v.y, 2.0f * v.z, 2.0f * v.w);
    }
}

__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4],
                                         const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Operands loaded as single words for each multiplication, or kept for four of them.
// sass hmma_bad: per_hmma
extern "C" __global__ void hmma_bad(int n, const unsigned* x, float* y) {
    float c[4] = {};
    for (int k = 0; k < n; ++k) {
        unsigned a[4], b[2];
        for (int i = 0; i < 4; ++i) {
            a[i] = x[(k * 6 + i) * n];
        }
        b[0] = x[(k * 6 + 4) * n];
        b[1] = x[(k * 6 + 5) * n];
        multiply(c, a, b);
    }
    y[threadIdx.x] = c[0] + c[1] + c[2] + c[3];
}
// sass hmma_good:
extern "C" __global__ void hmma_good(int n, const uint4* x, float* y) {
    float c[4][4] = {};
    for (int k = 0; k < n; ++k) {
        const uint4 v = x[k], w = x[k + n];
        const unsigned a[4] = {v.x, v.y, v.z, v.w}, b[2] = {w.x, w.y};
        for (auto& row : c) {
            multiply(row, a, b);
        }
    }
    y[threadIdx.x] = c[0][0] + c[1][1] + c[2][2] + c[3][3];
}
// No multiplication is left, although the budget expects some.
// sass lost_loop: per_hmma
extern "C" __global__ void lost_loop(float* y) {
    y[threadIdx.x] = 0.0f;
}

// One word of shared memory per multiplication, or one for several.
// sass words_bad: ffma_per_word
extern "C" __global__ void words_bad(int n, float* y) {
    __shared__ float tile[1024];
    tile[threadIdx.x] = y[threadIdx.x];
    __syncthreads();
    float sum = 0.0f;
    for (int k = 0; k < n; ++k) {
        for (int i = 0; i < 8; ++i) {
            sum += tile[k * 8 + i] * tile[(k * 9 + i * 5 + threadIdx.x) & 1023];
        }
    }
    y[threadIdx.x] = sum;
}
// sass words_good:
extern "C" __global__ void words_good(int n, float* y) {
    __shared__ float4 tile[256];
    tile[threadIdx.x] = make_float4(y[threadIdx.x], 1.0f, 2.0f, 3.0f);
    __syncthreads();
    float sums[4][4] = {};
    for (int k = 0; k < n; ++k) {
        const float4 v = tile[k], w = tile[(k + threadIdx.x) & 255];
        const float a[4] = {v.x, v.y, v.z, v.w}, b[4] = {w.x, w.y, w.z, w.w};
        for (int i = 0; i < 4; ++i) {
            for (int j = 0; j < 4; ++j) {
                sums[i][j] += a[i] * b[j];
            }
        }
    }
    for (int i = 0; i < 16; ++i) {
        y[threadIdx.x * 16 + i] = sums[i / 4][i % 4];
    }
}

// sass long_bad: instructions
extern "C" __global__ void long_bad(float* y) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        y[i * 32] += 1.0f;
    }
}
// sass long_good:
extern "C" __global__ void long_good(float* y) {
#pragma unroll 4
    for (int i = 0; i < 64; ++i) {
        y[i * 32] += 1.0f;
    }
}

// One block writes data that the last block reads.
// sass fences_bad: fences
extern "C" __global__ void fences_bad(unsigned* count, float* y) {
    y[blockIdx.x] = 1.0f;
    __threadfence();
    if (atomicAdd(count, 1) == gridDim.x - 1) {
        y[0] += y[gridDim.x - 1];
    }
}
// sass fences_good:
extern "C" __global__ void fences_good(unsigned* count, float* y) {
    y[blockIdx.x] = 1.0f;
    __threadfence();
    if (atomicAdd(count, 1) == gridDim.x - 1) {
        __threadfence();
        y[0] += y[gridDim.x - 1];
    }
}
