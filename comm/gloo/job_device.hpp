// Gloo's TCP device for the ranks of one job: its listeners admit only connections that begin with
// the job's token. Gloo itself takes the first connection to a listener for that of the rank it
// waits for, whoever has made it, so that a stranger who merely connects would end the start.
#pragma once

#include <gloo/transport/device.h>
#include <gloo/transport/tcp/attr.h>

#include <memory>
#include <string>

namespace gyre::comm {

// The token is the same on all ranks of the job, and differs from that of other jobs. Connections
// carry it as it is: who can listen to one learns it.
std::shared_ptr<gloo::transport::Device> make_job_device(const gloo::transport::tcp::attr& address,
                                                         const std::string& token);

}  // namespace gyre::comm
