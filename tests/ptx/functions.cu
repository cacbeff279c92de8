// expf and logf as nvcc compiles them: functions_test.cpp compares them with the exact values.
__global__ void functions(const float* values, float* powers, float* logarithms) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    powers[i] = expf(values[i]);
    logarithms[i] = logf(values[i]);
}
