#include "tests/ptx/instructions.hpp"

#include <sstream>

namespace gyre::ptx {

void Handlers::add(const std::string& names, Handler handler) {
    std::istringstream words(names);
    for (std::string name; words >> name;) {
        handlers_[name] = handler;
    }
}
Handler Handlers::find(const std::string& name) const {
    const auto found = handlers_.find(name);
    return found == handlers_.end() ? nullptr : found->second;
}

Handler find_handler(const std::string& name) {
    static const Handlers handlers = [] {
        Handlers all;
        add_arithmetic(all);
        add_conversions(all);
        add_memory(all);
        add_warp_operations(all);
        return all;
    }();
    return handlers.find(name);
}

}  // namespace gyre::ptx
