// The runtime of gyre's CUDA code: memory, streams, events, graphs.
//
// Everything in kernels/cuda/ and kernels/gpu/ is compiled twice: for a GPU, into namespace
// gyre::cuda, and, with GYRE_EMULATED defined, for the emulator of kernels/emulation/, into
// gyre::emulated. Both have the interface of the emulator's runtime; kernels/cuda/runtime.cpp
// implements it for a GPU, where errors name expression, location, host and, if known, a remedy.
#pragma once

#if defined(GYRE_EMULATED)
#define SIMT_NAMESPACE emulated
#else
#define SIMT_NAMESPACE cuda
#define SIMT_RUNTIME gyre::cuda
#endif
#include "kernels/emulation/runtime.hpp"

#if defined(GYRE_EMULATED)
namespace gyre::emulated {
using namespace simt;
}
#endif
