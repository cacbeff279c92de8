// In place of gloo_communicator.cpp where Gloo was not found.
#include "comm/launch/rendezvous.hpp"

namespace gyre::comm {

bool gloo_available() {
    return false;
}

std::unique_ptr<Communicator> make_gloo_communicator(const StartUp&, const LaunchSpec&,
                                                     StartAlarm&) {
    throw Error(ExitCode::internal, "gyre was built without Gloo");  // refused before
}

}  // namespace gyre::comm
