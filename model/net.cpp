#include "model/net.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "model/layout.hpp"
#include "model/memory_plan.hpp"

namespace gyre::model {

Net::Net(Backend& backend, const ModelSpec& model, const Shape& input, int classes,
         const NetOptions& options)
    : backend_(backend),
      input_shape_(input),
      classes_(classes),
      loss_(options.loss),
      type_(type_of(options.spec.precision)),
      wide_(backend),
      graph_(build_graph(model, input, classes, options.spec.dropout)) {
    if (options.spec.fold && options.train_batch == 0) {
        whole_ = tensors_of(graph_);
        graph_ = fold_batchnorms(graph_, folds_);
    }
    const Graph fused = fuse(graph_);
    if (options.spec.fuse) {
        graph_ = fused;
    }
    make_operations(options);
    count_leaves(options);
    make_head(options);
    place_parameters(options);
    if (options.train_batch > 0) {
        find_fusable_layers(fused, options.train_batch);
    }
    const int largest_batch = std::max(options.train_batch, options.eval_batch);
    const std::int64_t more_leaves = places_ - 1;
    input_leaf_bytes_ =
        static_cast<std::ptrdiff_t>(whole_blocks(activation_bytes(input, options.train_batch)));
    labels_leaf_elems_ = std::ptrdiff_t{loss_.mixed ? 3 : 1} * options.train_batch;
    input_ = {backend, static_cast<std::int64_t>(activation_bytes(input, largest_batch)) +
                           more_leaves * input_leaf_bytes_};
    labels_ = {backend, std::int64_t{loss_.mixed ? 3 : 1} * largest_batch +
                            more_leaves * labels_leaf_elems_};
    if (!loss_.class_weights.empty()) {
        class_weights_ = {backend, classes};
        backend.upload(class_weights_.get(), loss_.class_weights.data(), class_weights_.bytes());
    }
    if (type_ != DataType::float32) {
        for (const Node& node : graph_.nodes) {  // add(), and at the end loss()
            wide_.reserve(2 * backend.activation_elems(node.out, largest_batch));
        }
        wide_.allocate();
    }
    place_activations(options);
}

void Net::make_operations(const NetOptions& options) {
    const int leaves = std::max(options.leaves, 1) + (options.guest ? 1 : 0);
    const OpSizes sizes{options.train_batch, options.eval_batch, options.train_sizes,
                        options.eval_sizes, std::max(leaves, options.most_leaves)};
    const auto accepts = [&](const Node& node) {
        return make_op(wide_, node.name, node.spec, sizes, type_) != nullptr;
    };
    if (options.spec.fuse) {
        graph_ = fuse_dropout(graph_, accepts);
    }
    agree_on_layouts(graph_, accepts);
    for (std::size_t i = 0; i < graph_.nodes.size();) {
        const Node& node = graph_.nodes[i];
        std::unique_ptr<Op> op = make_op(wide_, node.name, node.spec, sizes, type_);
        if (op != nullptr) {
            ops_.push_back(std::move(op));
            ++i;
        } else if (!node.parts.empty()) {
            graph_ = split(graph_, i);
        } else {
            throw usage_error(fmt::format("{}: there is no such operation on this device ({})",
                                          node.name, backend_.description()));
        }
    }
}

void Net::count_leaves(const NetOptions& options) {
    meets_ = options.leaves > 0 && std::any_of(ops_.begin(), ops_.end(), [&](const auto& op) {
                 const OpNeeds needs = op->needs();
                 return needs.phases > 1 || (options.together && needs.together);
             });
    leaves_ = meets_ ? options.leaves : 1;
    places_ = leaves_ + (meets_ && options.guest ? 1 : 0);
}

// The last operation with the loss, if the backend has that; the loss is then the plain one. Where
// leaves meet, their passes take both apart, on any number of ranks.
void Net::make_head(const NetOptions& options) {
    const auto* linear = std::get_if<LinearSpec>(&graph_.nodes.back().spec);
    if (linear != nullptr && !linear->relu && options.train_batch > 0 && loss_.plain() &&
        !options.logits && !meets_) {
        head_ = backend_.make_loss_head(*linear, options.train_batch, type_);
    }
}

void Net::find_fusable_layers(const Graph& fused, int most_images) {
    TrainingPassSpec spec{
        .input = input_shape_, .classes = classes_, .layers = {}, .images = most_images};
    std::vector<std::int64_t> offsets;  // of each layer's weight and bias
    for (const Node& node : graph_.nodes) {
        for (const Parameter& parameter : node.parameters) {
            offsets.push_back(parameter.offset_elems);
        }
    }
    auto offset = offsets.begin();
    for (std::size_t i = 0; i < fused.nodes.size(); ++i) {
        const Node& node = fused.nodes[i];
        const int before = i == 0 ? Node::kInput : static_cast<int>(i) - 1;
        if (node.inputs != std::vector<int>{before} || !node.state.empty()) {
            return;
        }
        TrainingPassSpec::Layer& layer = spec.layers.emplace_back();
        layer.spec = node.spec;
        if (!node.parameters.empty()) {
            layer.weight_offset = *offset++;
            layer.bias_offset = *offset++;
        }
    }
    fusable_layers_ = std::move(spec);
}

void Net::forward(std::span<const Batch> leaves) {
    const Batch& batch = leaves.front();
    const std::size_t ops = ops_.size() - (batch.training && head_ != nullptr ? 1 : 0);
    std::size_t done = 0;
    if (!batch.training && batch.n > eval_chunk_) {
        done = chunked_nodes_;
        for (int first = 0; first < batch.n && done > 0; first += eval_chunk_) {
            Batch chunk = batch;
            chunk.n = std::min(eval_chunk_, batch.n - first);
            run_forward(0, done, std::span(&chunk, 1),
                        static_cast<std::size_t>(first / eval_chunk_));
        }
    }
    run_forward(done, ops, leaves);
}

void Net::run_forward(std::size_t first, std::size_t last, std::span<const Batch> leaves,
                      std::size_t chunk) {
    for (std::size_t i = first; i < last; ++i) {
        const TimelineSpan span(leaves.front().timeline, "forward", graph_.nodes[i].name);
        const int phases = leaves.size() > 1 ? steps_[i].phases : 1;
        if (leaves.size() > 1 && steps_[i].together) {
            ops_[i]->forward_leaves(at_node(i, leaves));
            continue;
        }
        for (int phase = 0; phase < phases; ++phase) {
            for (const Batch& batch : leaves) {
                const Step& step = step_of(batch, i);
                OpIo of_chunk;
                if (chunk > 0) {
                    of_chunk = step.eval;
                    const auto move = [&](Tensor& tensor, std::size_t bytes) {
                        tensor.data = static_cast<std::byte*>(tensor.data) + chunk * bytes;
                    };
                    move(of_chunk.x, step.x_chunk);
                    move(of_chunk.x2, step.x2_chunk);
                    move(of_chunk.y, step.y_chunk);
                }
                const OpIo& io = batch.training ? step.train : chunk > 0 ? of_chunk : step.eval;
                if (step.copy_input && phase == 0) {
                    backend_.copy(io.y.data, io.x.data,
                                  activation_bytes(graph_.nodes[i].in, batch.n));
                }
                if (phases == 1) {
                    ops_[i]->forward(batch, io);
                } else {
                    ops_[i]->forward_phase(batch, io, phase);
                }
            }
        }
    }
}

std::vector<float> Net::export_logits(const Batch& batch) {
    const int n = batch.n;
    const Shape& shape = graph_.nodes.back().out;
    const Tensor from = logits(batch);
    const bool wide = type_ == DataType::float32;
    if (!wide) {
        backend_.widen(type_, backend_.activation_elems(shape, n), from.narrow(), wide_.get());
    }
    std::vector<float> values(static_cast<std::size_t>(n) * static_cast<std::size_t>(classes_));
    backend_.export_activation(shape, n, wide ? from.f32() : wide_.get(), values.data());
    return values;
}

void Net::import_logits(const Batch& batch, const std::vector<float>& values) {
    const Shape& shape = graph_.nodes.back().out;
    const Tensor to = logits(batch);
    const bool wide = type_ == DataType::float32;
    backend_.import_activation(shape, batch.n, values.data(), wide ? to.f32() : wide_.get());
    if (!wide) {
        backend_.narrow(type_, backend_.activation_elems(shape, batch.n), wide_.get(), to.narrow());
    }
}

void Net::loss(const Batch& batch, float scale, float* sums, const float* loss_scale) {
    const TimelineSpan span(batch.timeline, "loss");
    if (batch.training && head_ != nullptr) {
        const CrossEntropyArgs args{
            .classes = classes_, .labels = labels(), .scale = scale, .sums = sums};
        return head_->run(batch, steps_.back().train, args, loss_scale);
    }
    const Step& step = step_of(batch, ops_.size() - 1);
    const Tensor from = logits(batch);
    const bool wide = type_ == DataType::float32;
    const std::int64_t elems = backend_.activation_elems(graph_.nodes.back().out, batch.n);
    float* const gradient = wide ? step.train.dy.f32() : wide_.get() + wide_.elems() / 2;
    if (!wide) {
        backend_.widen(type_, elems, from.narrow(), wide_.get());
    }
    const CrossEntropyArgs args{.classes = classes_,
                                .logits = wide ? from.f32() : wide_.get(),
                                .labels = labels(batch.leaf),
                                .scale = scale,
                                .gradient = batch.training ? gradient : nullptr,
                                .sums = sums,
                                .label_smoothing = batch.training ? loss_.label_smoothing : 0.0f,
                                .class_weights = batch.training ? class_weights_.get() : nullptr,
                                .mixed = batch.training && loss_.mixed};
    backend_.cross_entropy(args, batch.n);
    if (!wide && batch.training) {
        backend_.narrow(type_, elems, gradient, step.train.dy.narrow(), loss_scale);
    }
}

void Net::backward_params(std::size_t node, const Leaves& leaves) {
    const auto count = static_cast<int>(leaves.batches.size());
    if (count == 1) {
        return ops_[node]->backward_params(leaves.batches.front(), *leaves.io[0]);
    }
    const LeafSums::Node sum{0, count, gradient_data()};
    ops_[node]->backward_params_leaves(leaves, {{&sum, 1}, gradient_data()});
}

Net::FlatRange Net::flat_range(const Node& node) {
    const Parameter& last = node.parameters.back();
    return {node.parameters.front().offset_elems, padded(last.offset_elems + last.elems)};
}

void Net::backward(std::span<const Batch> leaves, const BackwardHooks& hooks) {
    for (std::size_t i = ops_.size(); i-- > 0;) {
        if (!steps_[i].backward) {
            continue;
        }
        const TimelineSpan span(leaves.front().timeline, "backward", graph_.nodes[i].name);
        // Leaves that meet do so after the first function; others go through all three alone.
        const bool at_once = leaves.size() > 1 && steps_[i].together;
        const std::size_t together = at_once || steps_[i].phases > 1 ? leaves.size() : 1;
        for (std::size_t first = 0; first < leaves.size(); first += together) {
            const std::span<const Batch> some = leaves.subspan(first, together);
            if (at_once) {
                backward_together(i, some, hooks);
            }
            for (std::size_t leaf = 0; leaf < some.size() && !at_once; ++leaf) {
                backward_weights(i, some[leaf], hooks);
            }
            for (std::size_t leaf = 0; leaf < some.size() && !at_once; ++leaf) {
                backward_inputs(i, some[leaf]);
            }
            for (const Batch& batch : some) {
                backward_sums(i, batch, hooks);
            }
        }
    }
}

bool Net::updates(std::size_t node, const Batch& batch, const BackwardHooks& hooks) const {
    return hooks.update != nullptr && !with_loss(node) && !graph_.nodes[node].parameters.empty() &&
           ops_[node]->can_update(batch);
}

void Net::backward_weights(std::size_t node, const Batch& batch, const BackwardHooks& hooks) {
    const OpIo& io = step_of(batch, node).train;
    if (!with_loss(node)) {
        ops_[node]->backward_begin(batch, io);
    }
    const std::vector<Parameter>& parameters = graph_.nodes[node].parameters;
    if (parameters.empty() || updates(node, batch, hooks)) {
        return;
    }
    // Before the inputs, so that their reduction can start while the rest is computed.
    if (!with_loss(node) && (!hooks.take || !hooks.take(batch, node, io.x, io.dy))) {
        ops_[node]->backward_params(batch, io);
    }
    const std::int64_t offset = parameters.front().offset_elems;
    if (batch.leaf + 1 < batch.leaves) {
        hooks.leaf_ready(batch.leaf, offset);
    } else if (hooks.ready && !is_guest(batch)) {
        hooks.ready(offset);
    }
}

void Net::backward_together(std::size_t node, std::span<const Batch> leaves,
                            const BackwardHooks& hooks) {
    const std::vector<Parameter>& parameters = graph_.nodes[node].parameters;
    Op& op = *ops_[node];
    if (hooks.sums.nodes.empty()) {
        for (const Batch& batch : leaves) {
            backward_weights(node, batch, hooks);
        }
    } else {
        bool taken = false;
        for (const Batch& batch : leaves) {
            const OpIo& io = step_of(batch, node).train;
            op.backward_begin(batch, io);
            taken = hooks.take && hooks.take(batch, node, io.x, io.dy);
        }
        if (!taken) {
            op.backward_params_leaves(at_node(node, leaves), hooks.sums);
        }
        hooks.summed(parameters.front().offset_elems);
    }
    bool any = false;
    for (const Batch& batch : leaves) {
        any = prepare_inputs(node, batch);
    }
    if (any) {
        op.backward_input_leaves(at_node(node, leaves));
    }
}

// Returns whether the operation has a gradient to compute.
bool Net::prepare_inputs(std::size_t node, const Batch& batch) {
    const Step& step = step_of(batch, node);
    const OpIo& io = step.train;
    if (step.second_gradient && !io.dx2) {
        pass_on(batch, step, graph_.nodes[node]);
    }
    if ((io.dx || io.dx2) && step.copy_dy) {
        backend_.copy(io.dx.data, io.dy.data, activation_bytes(graph_.nodes[node].in, batch.n));
    }
    return (io.dx || io.dx2) && !with_loss(node);
}

void Net::backward_inputs(std::size_t node, const Batch& batch) {
    if (prepare_inputs(node, batch)) {
        ops_[node]->backward_input(batch, step_of(batch, node).train);
    }
}

void Net::backward_sums(std::size_t node, const Batch& batch, const BackwardHooks& hooks) {
    const Step& step = step_of(batch, node);
    const OpIo& io = step.train;
    if (step.add_to && (io.dx || io.dx2)) {
        add(graph_.nodes[node].in, batch.n, io.dx, step.add_to);
    }
    if (step.second_gradient && io.dx2) {
        add(shape_of(graph_.nodes[node].inputs[1]), batch.n, io.dx2, step.second_gradient);
    }
    if (updates(node, batch, hooks)) {
        const FlatRange range = flat_range(graph_.nodes[node]);
        ops_[node]->backward_update(batch, io, *hooks.update, range.begin);
        hooks.updated(range.begin, range.end);
        if (hooks.ready) {
            hooks.ready(range.begin);
        }
    }
}

void Net::add(const Shape& shape, int n, const Tensor& x, const Tensor& y) {
    const std::int64_t elems = backend_.activation_elems(shape, n);
    if (type_ == DataType::float32) {
        return backend_.add(elems, x.f32(), y.f32());
    }
    float* const sum = wide_.get();
    float* const term = sum + wide_.elems() / 2;
    backend_.widen(type_, elems, y.narrow(), sum);
    backend_.widen(type_, elems, x.narrow(), term);
    backend_.add(elems, term, sum);
    backend_.narrow(type_, elems, sum, y.narrow());
}

void Net::pass_on(const Batch& batch, const Step& step, const Node& node) {
    if (step.second_adds) {
        add(node.out, batch.n, step.train.dy, step.second_gradient);
    } else {
        backend_.copy(step.second_gradient.data, step.train.dy.data,
                      activation_bytes(node.out, batch.n));
    }
}

}  // namespace gyre::model
