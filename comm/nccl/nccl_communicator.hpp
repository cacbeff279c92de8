// Reductions in the memory of CUDA GPUs, over NCCL.
#pragma once

#include <memory>

#include "comm/communicator.hpp"

namespace gyre::comm {

struct NcclOptions {
    bool required = false;              // otherwise host reductions where NCCL cannot be used
    bool share_gpu = false;             // several ranks may use one GPU
    bool register_buffers = false;      // with NCCL, what is reduced
    double init_timeout = 60.0;         // seconds until NCCL must have connected the ranks
    double collective_timeout = 120.0;  // seconds that submitting one reduction may take
};

// Around a communicator of the host's, which keeps everything but the reductions of gradients. NCCL
// is loaded and started when use_device() tells which GPU.
std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<Communicator> host,
                                                     const NcclOptions& options);

}  // namespace gyre::comm
