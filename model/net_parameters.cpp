// A net's parameters and state: their place in memory, what they begin as, and their way to and
// from host tensors.
#include <map>
#include <utility>

#include "model/import.hpp"
#include "model/net.hpp"

namespace gyre::model {

void Net::place_parameters(const NetOptions& options) {
    const auto place = [](Parameter& tensor, std::int64_t& end, std::vector<Parameter>& list) {
        tensor.offset_elems = end;
        end += padded(tensor.elems);
        if (!tensor.fixed) {
            list.push_back(tensor);
        }
    };
    std::int64_t state_elems = 0;
    for (Node& node : graph_.nodes) {
        if (!node.parameters.empty()) {
            layer_begins_.push_back(flat_elems_);
        }
        for (Parameter& parameter : node.parameters) {
            parameter.init = init_of(parameter, options.spec.weight_init);
            place(parameter, flat_elems_, parameters_);
        }
        for (Parameter& tensor : node.state) {
            place(tensor, state_elems, state_);
        }
    }
    flat_parameters_ = {backend_, flat_elems_};
    flat_gradients_ = {backend_, gradient_elems()};
    flat_state_ = {backend_, state_elems};
    unused_state_ = {backend_, places_ > 1 ? state_elems : 0};
    guest_gradients_ = {backend_, places_ > leaves_ ? gradient_elems() : 0};
    for (const Node& node : graph_.nodes) {
        for (const Parameter& parameter : node.parameters) {
            if (parameter.fixed && parameter.init == Init::ones) {
                set_parameter(parameter,
                              std::vector<float>(static_cast<std::size_t>(parameter.elems), 1.0f));
            }
        }
    }
}

std::vector<Net::Placed> Net::all_tensors() const {
    std::vector<Placed> all;
    for (const Parameter& parameter : parameters_) {
        all.push_back({parameter, parameter_data() + parameter.offset_elems});
    }
    for (const Parameter& tensor : state_) {
        all.push_back({tensor, state_data() + tensor.offset_elems});
    }
    return all;
}

std::int64_t Net::parameter_count() const {
    std::int64_t count = 0;
    for (const Parameter& parameter : parameters_) {
        count += parameter.elems;
    }
    return count;
}

void Net::initialise(std::uint64_t seed) {
    std::uint32_t index = 0;
    for (const Placed& placed : all_tensors()) {
        const RandomStream stream{seed, RandomPurpose::init, index++, 0};
        upload(placed, initial_values(placed.tensor, stream));
    }
}

void Net::visit_parameters(const TensorVisitor& visit) const {
    std::vector<float> copy;
    for (const Placed& placed : all_tensors()) {
        const auto elems = static_cast<std::size_t>(placed.tensor.elems);
        const float* values = placed.data;
        if (!backend_.host_memory()) {
            copy.resize(elems);
            backend_.download(copy.data(), placed.data, elems * sizeof(float));
            values = copy.data();
        }
        visit(placed.tensor.name, placed.tensor.shape, {values, elems});
    }
}

std::vector<HostTensor> Net::export_parameters() const {
    return copies([&](const TensorVisitor& visit) { visit_parameters(visit); });
}

std::vector<std::string> Net::import_parameters(const std::vector<HostTensor>& tensors,
                                                const std::string& source, bool finetune) {
    const std::vector<Parameter> wanted = folds_.empty() ? tensors_of(graph_) : whole_;
    ParameterMatch match = match_parameters(wanted, tensors, source, finetune);
    std::map<std::string, const std::vector<float>*> given;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        if (match.tensors[i] < tensors.size()) {
            given[wanted[i].name] = &tensors[match.tensors[i]].values;
        }
    }
    const auto find = [&](const std::string& name) {
        const auto found = given.find(name);
        return found == given.end() ? nullptr : found->second;
    };
    const auto folded = folded_values(folds_, find);
    for (const Placed& placed : all_tensors()) {
        const auto found = folded.find(placed.tensor.name);
        if (const auto* const values =
                found != folded.end() ? &found->second : find(placed.tensor.name)) {
            upload(placed, *values);
        }
    }
    return std::move(match.remarks);
}

}  // namespace gyre::model
