// Reductions in the memory of CUDA GPUs, over NCCL.
#pragma once

#include <memory>

#include "comm/communicator.hpp"

namespace gyre::comm {

struct NcclOptions {
    bool required = false;              // if not, reduces on the host if NCCL cannot be used
    bool share_gpu = false;             // several ranks may use one GPU
    double init_timeout = 60.0;         // seconds until NCCL must have connected the ranks
    double collective_timeout = 120.0;  // seconds that submitting one reduction may take
};

// Wraps a host communicator, which keeps everything except the reductions of gradients. NCCL is
// loaded and started when use_device() names the GPU.
std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<Communicator> host,
                                                     const NcclOptions& options);

}  // namespace gyre::comm
