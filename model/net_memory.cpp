// Where a net's activations are: which values share memory, how long each is needed, and the
// pointers that the operations get.
//
// Time: node i runs forward at i and backward at 2N - i; the loss is between, at N.
#include <fmt/format.h>

#include <algorithm>

#include "model/net.hpp"

namespace gyre::model {

namespace {
constexpr int kNone = -1;

void need(Lifetime& block, int time) {
    block.first = block.last < block.first ? time : std::min(block.first, time);
    block.last = std::max(block.last, time);
}
}  // namespace

struct Net::Plan {
    std::vector<OpNeeds> needs;
    std::vector<int> readers;           // of each value
    std::vector<int> value_storage;     // of each value: a number, or the net's input
    std::vector<int> gradient_storage;  // of each value's gradient; kNone: not computed
    std::vector<int> dx_storage;        // of each node: gradient_storage, or memory for a while
    std::vector<int> dx2_storage;       // likewise
    std::vector<Lifetime> values, values_in_evaluation, gradients, saved;
    std::vector<bool> whole;  // storages that evaluations have for the whole batch
    std::vector<std::size_t> value_at, value_in_evaluation_at, gradient_at, saved_at;

    // Where a value is: a storage, or the net's input.
    int storage_of(int value) const {
        return value == Node::kInput ? value : value_storage[static_cast<std::size_t>(value)];
    }
};

std::size_t Net::activation_bytes(const Shape& shape, int n) const {
    return static_cast<std::size_t>(backend_.activation_elems(shape, n)) * bytes_of(type_);
}

const Shape& Net::shape_of(int value) const {
    return value == Node::kInput ? input_shape_ : graph_.nodes[static_cast<std::size_t>(value)].out;
}

// Values share memory along operations in place, where nobody else reads the input and no backward
// pass needs it as it was. A ReLU's output may be overwritten by dropout: where that drops, dy is
// zero as well, so the mask y > 0 still gives the right gradient.
void Net::alias_values(Plan& plan) const {
    const auto count = graph_.nodes.size();
    plan.readers.assign(count, 0);
    int input_readers = 0;
    for (const Node& node : graph_.nodes) {
        for (const int input : node.inputs) {
            ++(input == Node::kInput ? input_readers
                                     : plan.readers[static_cast<std::size_t>(input)]);
        }
    }
    std::vector<bool> read_again(count, false);  // storages of values that a backward pass reads
    bool input_read_again = false;
    int storages = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const Node& node = graph_.nodes[i];
        const int input = node.inputs.front();
        const bool from_input = input == Node::kInput;
        const auto value = static_cast<std::size_t>(from_input ? 0 : input);
        const bool only_reader = (from_input ? input_readers : plan.readers[value]) == 1;
        const int storage = from_input ? Node::kInput : plan.value_storage[value];
        const bool needed = storage == Node::kInput ? input_read_again
                                                    : read_again[static_cast<std::size_t>(storage)];
        const bool shares = plan.needs[i].in_place && only_reader &&
                            !plan.needs[i].backward_reads_x &&
                            (!needed || std::holds_alternative<DropoutSpec>(node.spec));
        plan.value_storage.push_back(shares ? storage : storages++);
        const int own = plan.value_storage.back();
        if (plan.needs[i].backward_reads_y) {
            if (own == Node::kInput) {
                input_read_again = true;
            } else {
                read_again[static_cast<std::size_t>(own)] = true;
            }
        }
    }
    plan.values.assign(static_cast<std::size_t>(storages), {});
    plan.values_in_evaluation = plan.values;
    plan.whole.assign(plan.values.size(), chunked_nodes_ == 0);
    const auto needs_all = [&](int value) {
        if (plan.storage_of(value) != Node::kInput) {
            plan.whole[static_cast<std::size_t>(plan.storage_of(value))] = true;
        }
    };
    needs_all(static_cast<int>(count) - 1);
    for (std::size_t i = chunked_nodes_; i < count; ++i) {
        needs_all(static_cast<int>(i));
        std::ranges::for_each(graph_.nodes[i].inputs, needs_all);
    }
}

// Convolutions and what is between them run on few images at a time in evaluations on a CPU. Linear
// layers, whose weights would be read again and again, do not, nor what follows them.
void Net::choose_chunk(const NetOptions& options) {
    constexpr std::size_t kChunkBytes = std::size_t{8} << 20;  // of an operation's values
    if (!backend_.host_memory() || backend_.device_identity().emulated) {
        return;
    }
    int block = 1;  // images that the backend keeps together
    while (backend_.activation_elems({1, 1, 1}, block) != block) {
        ++block;
    }
    std::size_t bytes = 1;
    std::size_t nodes = 0;
    for (; nodes < graph_.nodes.size(); ++nodes) {
        const Node& node = graph_.nodes[nodes];
        if (std::holds_alternative<LinearSpec>(node.spec)) {
            break;
        }
        bytes =
            std::max(bytes, activation_bytes(node.in, block) + activation_bytes(node.out, block));
    }
    eval_chunk_ = block * static_cast<int>(std::max<std::size_t>(1, kChunkBytes / bytes));
    chunked_nodes_ = eval_chunk_ < options.eval_batch ? nodes : 0;
}

void Net::plan_training(Plan& plan, const NetOptions& options) {
    const int count = static_cast<int>(graph_.nodes.size());
    const auto backward_time = [&](std::size_t i) { return 2 * count - static_cast<int>(i); };
    const auto use = [&](int value, int time) {
        const int storage = plan.storage_of(value);
        if (storage != Node::kInput) {
            Lifetime& block = plan.values[static_cast<std::size_t>(storage)];
            block.bytes =
                std::max(block.bytes, activation_bytes(shape_of(value), options.train_batch));
            need(block, time);
        }
    };
    std::vector<bool> wanted;  // whether there is a gradient of each value
    const auto wants = [&](int value) {
        return value != Node::kInput && wanted[static_cast<std::size_t>(value)];
    };
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
        const Node& node = graph_.nodes[i];
        wanted.push_back(!node.parameters.empty() ||
                         std::any_of(node.inputs.begin(), node.inputs.end(), wants));
        steps_[i].backward = wanted[i];
        const int now = static_cast<int>(i), then = backward_time(i);
        use(now, now);
        for (const int input : node.inputs) {
            use(input, now);
        }
        if (wanted[i] && plan.needs[i].backward_reads_x) {
            use(node.inputs.front(), then);
        }
        if (wanted[i] && plan.needs[i].backward_reads_y) {
            use(now, then);
        }
        if (wanted[i] && plan.needs[i].backward_reads_x2) {
            use(node.inputs[1], then);
        }
        plan.saved.push_back({plan.needs[i].saved_bytes, now, wanted[i] ? then : now});
    }
    use(count - 1, count);
    plan_gradients(plan, options, wanted);
}

// From the last node to the first: who comes first to a value writes its gradient, others add
// theirs to it.
void Net::plan_gradients(Plan& plan, const NetOptions& options, const std::vector<bool>& wanted) {
    const auto count = graph_.nodes.size();
    plan.gradient_storage.assign(count, kNone);
    plan.dx_storage.assign(count, kNone);
    plan.dx2_storage.assign(count, kNone);
    const auto storage_of = [&](int value) -> int& {
        return plan.gradient_storage[static_cast<std::size_t>(value)];
    };
    const auto block_for = [&](const Shape& shape, int time) {
        plan.gradients.push_back({activation_bytes(shape, options.train_batch), time, time});
        return static_cast<int>(plan.gradients.size()) - 1;
    };
    const auto use = [&](int storage, int time) {
        need(plan.gradients[static_cast<std::size_t>(storage)], time);
    };
    storage_of(static_cast<int>(count) - 1) =
        block_for(graph_.nodes.back().out, static_cast<int>(count));
    for (std::size_t i = count; i-- > 0;) {
        const Node& node = graph_.nodes[i];
        Step& step = steps_[i];
        if (!step.backward) {
            continue;
        }
        const int time = static_cast<int>(2 * count - i);
        const int dy = plan.gradient_storage[i];
        use(dy, time);
        const auto wants = [&](int value) {
            return value != Node::kInput && wanted[static_cast<std::size_t>(value)];
        };
        if (node.inputs.size() > 1 && wants(node.inputs[1])) {
            int& second = storage_of(node.inputs[1]);
            step.second_adds = second != kNone;
            if (plan.needs[i].writes_dx2) {
                plan.dx2_storage[i] = block_for(shape_of(node.inputs[1]), time);
                second = step.second_adds ? second : plan.dx2_storage[i];
            } else {
                second = step.second_adds ? second : block_for(node.out, time);
            }
            use(second, time);
        }
        const int input = node.inputs.front();
        if (!wants(input)) {
            continue;
        }
        int& gradient = storage_of(input);
        const bool first = gradient == kNone;
        const bool alone = plan.readers[static_cast<std::size_t>(input)] == 1;
        if (plan.needs[i].in_place && alone) {
            gradient = plan.dx_storage[i] = dy;
            continue;
        }
        step.copy_dy = plan.needs[i].in_place;
        plan.dx_storage[i] = block_for(node.in, time);
        if (first) {
            gradient = plan.dx_storage[i];
        } else {
            use(gradient, time);
        }
    }
}

void Net::plan_evaluation(Plan& plan, const NetOptions& options) const {
    const auto use = [&](int value, std::size_t time) {
        const int storage = plan.storage_of(value);
        if (storage != Node::kInput) {
            Lifetime& block = plan.values_in_evaluation[static_cast<std::size_t>(storage)];
            const bool whole = plan.whole[static_cast<std::size_t>(storage)];
            block.bytes = std::max(
                block.bytes,
                activation_bytes(shape_of(value), whole ? options.eval_batch : eval_chunk_));
            need(block, static_cast<int>(time));
            if (whole && time < chunked_nodes_) {
                need(block, 0);  // while the first nodes run on the next images
                need(block, static_cast<int>(chunked_nodes_));
            }
        }
    };
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
        use(static_cast<int>(i), i);
        for (const int input : graph_.nodes[i].inputs) {
            use(input, i);
        }
    }
    use(static_cast<int>(graph_.nodes.size()) - 1, graph_.nodes.size());
}

void Net::place_activations(const NetOptions& options) {
    Plan plan;
    for (const auto& op : ops_) {
        plan.needs.push_back(op->needs());
    }
    steps_.assign(ops_.size(), {});
    choose_chunk(options);
    alias_values(plan);
    plan_training(plan, options);
    plan_evaluation(plan, options);

    std::vector<Lifetime> all = plan.values;
    all.insert(all.end(), plan.gradients.begin(), plan.gradients.end());
    all.insert(all.end(), plan.saved.begin(), plan.saved.end());
    const MemoryPlan training = plan_memory(all);
    const MemoryPlan evaluation = plan_memory(plan.values_in_evaluation);
    const auto values = static_cast<std::ptrdiff_t>(plan.values.size());
    const auto gradients = values + static_cast<std::ptrdiff_t>(plan.gradients.size());
    plan.value_at.assign(training.offsets.begin(), training.offsets.begin() + values);
    plan.gradient_at.assign(training.offsets.begin() + values,
                            training.offsets.begin() + gradients);
    plan.saved_at.assign(training.offsets.begin() + gradients, training.offsets.end());
    plan.value_in_evaluation_at = evaluation.offsets;
    arena_leaf_bytes_ = static_cast<std::ptrdiff_t>(whole_blocks(training.bytes));
    const auto all_leaves = static_cast<std::size_t>(places_ * arena_leaf_bytes_);
    arena_ = {backend_, static_cast<std::int64_t>(std::max(all_leaves, evaluation.bytes))};
    steps_.resize(ops_.size() * static_cast<std::size_t>(places_));
    for (int leaf = places_ - 1; leaf >= 0; --leaf) {
        bind(plan, leaf);
    }
    for (std::size_t node = 0; node < ops_.size(); ++node) {
        for (int leaf = 0; leaf < places_; ++leaf) {
            leaf_ios_.push_back(&steps_[static_cast<std::size_t>(leaf) * ops_.size() + node].train);
        }
    }
}

void Net::bind(const Plan& plan, int leaf) {
    std::byte* const arena = arena_.get() + leaf * arena_leaf_bytes_;
    float* const gradients = leaf < leaves_ ? gradient_data() : guest_gradients();
    const auto at = [&](std::size_t offset) { return Tensor(arena + offset, type_); };
    const auto value = [&](int number, const std::vector<std::size_t>& offsets) {
        const int storage = plan.storage_of(number);
        return storage == Node::kInput ? input(leaf)
                                       : at(offsets[static_cast<std::size_t>(storage)]);
    };
    const auto gradient = [&](int storage) {
        return storage == kNone ? Tensor()
                                : at(plan.gradient_at[static_cast<std::size_t>(storage)]);
    };
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
        const Node& node = graph_.nodes[i];
        Step& step = steps_[static_cast<std::size_t>(leaf) * ops_.size() + i];
        step = steps_[i];
        step.phases = plan.needs[i].phases;
        step.together = plan.needs[i].together;
        const auto inputs_and_output = [&](OpIo& io, const std::vector<std::size_t>& offsets) {
            io.x = value(node.inputs.front(), offsets);
            io.y = value(static_cast<int>(i), offsets);
            if (node.inputs.size() > 1) {
                io.x2 = value(node.inputs[1], offsets);
            }
            for (std::size_t p = 0; p < node.parameters.size(); ++p) {
                io.params[p] = parameter_data() + node.parameters[p].offset_elems;
                io.grads[p] = gradients + node.parameters[p].offset_elems;
            }
        };
        for (OpIo* io : {&step.train, &step.eval}) {
            for (std::size_t s = 0; s < node.state.size(); ++s) {
                io->state[s] =
                    (leaf == 0 ? state_data() : unused_state_.get()) + node.state[s].offset_elems;
            }
        }
        inputs_and_output(step.train, plan.value_at);
        if (leaf == 0) {
            inputs_and_output(step.eval, plan.value_in_evaluation_at);
            const auto bytes_of_chunk = [&](int number) {
                const int storage = plan.storage_of(number);
                const bool whole =
                    storage == Node::kInput || plan.whole[static_cast<std::size_t>(storage)];
                return whole ? activation_bytes(shape_of(number), eval_chunk_) : 0;
            };
            step.x_chunk = bytes_of_chunk(node.inputs.front());
            step.y_chunk = bytes_of_chunk(static_cast<int>(i));
            step.x2_chunk = node.inputs.size() > 1 ? bytes_of_chunk(node.inputs[1]) : 0;
        }
        // By their storages: the addresses of a net without training are all the same.
        step.copy_input = plan.needs[i].in_place && plan.storage_of(node.inputs.front()) !=
                                                        plan.storage_of(static_cast<int>(i));
        step.train.saved = arena + plan.saved_at[i];
        step.train.dy = gradient(plan.gradient_storage[i]);
        if (!step.backward) {
            continue;
        }
        step.train.dx = gradient(plan.dx_storage[i]);
        const auto storage_of = [&](int number) {
            return number == Node::kInput ? kNone
                                          : plan.gradient_storage[static_cast<std::size_t>(number)];
        };
        const int of_input = storage_of(node.inputs.front());
        if (plan.dx_storage[i] != of_input) {
            step.add_to = gradient(of_input);
        }
        step.train.dx2 = gradient(plan.dx2_storage[i]);
        if (node.inputs.size() > 1 && plan.dx2_storage[i] != storage_of(node.inputs[1])) {
            step.second_gradient = gradient(storage_of(node.inputs[1]));
        }
    }
}

std::string Net::description() const {
    std::string text;
    for (const Node& node : graph_.nodes) {
        std::int64_t elems = 0;
        for (const Parameter& parameter : node.parameters) {
            elems += parameter.fixed ? 0 : parameter.elems;
        }
        text += fmt::format("{}  {} -> {}{}\n", node.name, text_of(node.in), text_of(node.out),
                            elems == 0 ? "" : fmt::format(", {} parameters", elems));
    }
    return text + fmt::format("activations and their gradients: {:.1f} MiB\n",
                              static_cast<double>(arena_.bytes()) / (1 << 20));
}

}  // namespace gyre::model
