// train/ is built of the rooms below it and names what is theirs without their namespaces.
#pragma once

namespace gyre::comm {}
namespace gyre::data {}
namespace gyre::model {}

namespace gyre::train {
using namespace comm;
using namespace data;
using namespace model;
}  // namespace gyre::train
