// A net on a backend: its operations, its flat buffers, and one pass forward and backward.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/function_ref.hpp"
#include "base/round_up.hpp"
#include "kernels/ops/backend.hpp"
#include "kernels/ops/converted_op.hpp"
#include "model/fuse.hpp"
#include "model/graph.hpp"
#include "model/memory_plan.hpp"
#include "model/net_spec.hpp"
#include "model/safetensors.hpp"
#include "model/spec.hpp"
#include "model/step_stats.hpp"

namespace gyre::model {

// The sizes of passes that a net is made for, and what it computes.
struct NetOptions {
    int train_batch = 64;   // the most images in a training pass
    int eval_batch = 1000;  // the most images in an evaluation pass
    NetSpec spec = {};
    LossSpec loss = {};
    // The numbers of images for which kernels are chosen, as passes have them (Sharding::sizes());
    // empty: the most images.
    std::vector<int> train_sizes = {}, eval_sizes = {};
    bool logits = false;  // training passes leave them, too
    // The parts of a step that are passes of this rank, if the step is cut into such as do not
    // depend on the ranks; 0: it is not.
    int leaves = 0;
    // Leaves go through the net side by side also where that only saves time, in operations that
    // take several together.
    bool together = false;
    // Where leaves meet, there is room for a guest: another rank's leaf, computed beside them with
    // the number after theirs, whose sums do not count.
    bool guest = false;
    // The most leaves for backward_params(), such as those of all ranks; 0: as many as here.
    int most_leaves = 0;
};

// Calls during a backward pass, from the end of the net on; each may be empty.
struct BackwardHooks {
    // All gradients at and after this offset are final.
    FunctionRef<void(std::int64_t offset)> ready = {};
    // All gradients of this leaf at and after this offset are final, and the next leaf overwrites
    // them. The last of several leaves calls ready() instead.
    FunctionRef<void(int leaf, std::int64_t offset)> leaf_ready = {};
    // Leaves that go through a node together have their gradients added up at once, to these sums,
    // which are final at and after this offset; without nodes, they are final as others are.
    LeafSums sums = {};
    FunctionRef<void(std::int64_t offset)> summed = {};
    // A node with parameters is offered, x [n][in] and dy [n][out] of each leaf; returns whether
    // its gradients are computed elsewhere, the same for all leaves.
    FunctionRef<bool(const Batch& leaf, std::size_t node, const Tensor& x, const Tensor& dy)> take =
        {};
    // Operations that can apply the update at once do so instead of writing gradients; updated()
    // says to which range of the flat parameters.
    const UpdateArgs* update = nullptr;
    FunctionRef<void(std::int64_t begin, std::int64_t end)> updated = {};
};

// Memory. Parameters are in one flat buffer, each beginning at a multiple of kAlignElems; gradients
// in another with the same offsets, followed by the StepStats, which travels with them through the
// reduction: the step's loss and other sums. The padding is always zero. Activations, what
// operations save for the backward pass and gradients of activations are in one arena, planned by
// liveness (memory_plan.hpp), which training and evaluation passes share.
class Net {
 public:
    static constexpr std::int64_t kAlignElems = 16;
    static constexpr std::int64_t padded(std::int64_t elems) {
        return round_up(elems, kAlignElems);
    }
    static constexpr std::int64_t kStatsElems = sizeof(StepStats) / sizeof(float);

    // Throws Error(bad_input) for a model that does not fit the images.
    Net(Backend& backend, const ModelSpec& model, const Shape& input, int classes,
        const NetOptions& options);

    const std::vector<Parameter>& parameters() const { return parameters_; }
    std::int64_t parameter_count() const;                    // without padding
    std::int64_t flat_elems() const { return flat_elems_; }  // parameters with padding
    std::int64_t gradient_elems() const { return flat_elems_ + kStatsElems; }
    std::int64_t stats_offset() const { return flat_elems_; }
    // Where the parameters of each node that has some begin in the flat buffers, ascending.
    const std::vector<std::int64_t>& layer_begins() const { return layer_begins_; }
    float* parameter_data() const { return flat_parameters_.get(); }
    // Values that are saved and loaded with the parameters but have no gradient, such as running
    // statistics: a flat buffer of its own.
    const std::vector<Parameter>& state() const { return state_; }
    float* state_data() const { return flat_state_.get(); }
    std::int64_t state_elems() const { return flat_state_.elems(); }
    float* gradient_data() const { return flat_gradients_.get(); }
    // At stats_offset(), on the device.
    StepStats* stats() const { return stats_in(gradient_data()); }
    const Shape& input_shape() const { return input_shape_; }
    // As they run: fused where the backend offers it.
    const std::vector<Node>& nodes() const { return graph_.nodes; }
    // Where the parameters of a node that has some are in the flat buffers, with their padding.
    struct FlatRange {
        std::int64_t begin, end;
    };
    static FlatRange flat_range(const Node& node);
    // A line for each node, for -v, and what the arena takes.
    std::string description() const;

    // As each parameter's Init says, from the stream (seed, init, index of the parameter).
    void initialise(std::uint64_t seed);
    // values [elems], of a parameter of this net.
    void set_parameter(const Parameter& parameter, const std::vector<float>& values) {
        upload({parameter, parameter_data() + parameter.offset_elems}, values);
    }
    // Shows parameters, then state, where the host can read them in place without copying.
    void visit_parameters(const TensorVisitor& visit) const;
    // Copies of parameters and state to and from host tensors. import matches them as
    // match_parameters() does, and returns its remarks for the user; `source` says where the
    // tensors come from. finetune: layers that they do not fit stay as they are.
    std::vector<HostTensor> export_parameters() const;
    std::vector<std::string> import_parameters(const std::vector<HostTensor>& tensors,
                                               const std::string& source, bool finetune = false);

    // Data type of activations between operations.
    DataType type() const { return type_; }
    const LossSpec& loss_spec() const { return loss_; }  // of the training
    // The layers as a backend's fused training pass takes them. Empty: the net has state, some
    // layer does not read the one before it alone, or the net is not for training.
    const std::optional<TrainingPassSpec>& fusable_layers() const { return fusable_layers_; }
    // True if a node's backward pass comes with the loss; backward() does not offer it to `take`.
    bool with_loss(std::size_t node) const { return head_ != nullptr && node + 1 == ops_.size(); }

    // The leaves that go through a training pass side by side: all of a step's, if they meet in an
    // operation, or one gains by it; otherwise 1, as each is a pass of its own.
    int leaves() const { return leaves_; }
    bool leaves_meet() const { return meets_; }
    static bool is_guest(const Batch& batch) { return batch.leaf == batch.leaves; }
    // Where a guest's gradients and statistics go, as in gradient_data().
    float* guest_gradients() const { return guest_gradients_.get(); }
    StepStats* stats(const Batch& batch) const {
        return is_guest(batch) ? stats_in(guest_gradients()) : stats();
    }

    // Where a batch goes: x [n][input], labels [n] or, if the loss is of mixed images, [3][n].
    Tensor input(int leaf = 0) const { return {input_.get() + leaf * input_leaf_bytes_, type_}; }
    std::int32_t* labels(int leaf = 0) const { return labels_.get() + leaf * labels_leaf_elems_; }

    // A pass over one batch, or over leaves().
    void forward(std::span<const Batch> leaves);
    void forward(const Batch& batch) { forward(std::span(&batch, 1)); }
    // After forward(): sums [2] on the device = scale * sum of losses, number of correct images;
    // in a training pass also the gradient of the first. Without sums they go to stats().
    // loss_scale, on the device: a further factor of the gradient of a net in 16 bits; null: 1.
    void loss(const Batch& batch, float scale, float* sums, const float* loss_scale = nullptr);
    void loss(const Batch& batch, float scale) { loss(batch, scale, &stats()->loss); }
    // After forward() in an evaluation pass, or in a training pass of a net that leaves them:
    // [n][classes], on the host.
    std::vector<float> export_logits(const Batch& batch);
    // The reverse, before loss(): logits that are computed elsewhere.
    void import_logits(const Batch& batch, const std::vector<float>& values);
    // After loss() in a training pass.
    void backward(std::span<const Batch> leaves, const BackwardHooks& hooks = {});
    void backward(const Batch& batch, const BackwardHooks& hooks = {}) {
        backward(std::span(&batch, 1), hooks);
    }
    // Writes the gradients of a node's parameters, from x and dy of a batch; of several leaves, the
    // sum in the tree over them, if takes_together(). On CPUs, where no operation is of 16 bits, x
    // and dy are float32 in any net. io: copies of gradient_io() with those.
    void backward_params(std::size_t node, const Leaves& leaves);
    const OpIo& gradient_io(std::size_t node) const { return steps_[node].train; }
    bool takes_together(std::size_t node) const { return meets_ && steps_[node].together; }

 private:
    // Everything that running a node needs besides its operation.
    struct Step {
        OpIo train, eval;
        bool copy_input = false;  // it works in place on a copy, as its input is needed further
        bool backward = false;    // it has a backward pass; with dx if that is not null
        bool copy_dy = false;     // dx begins as a copy of dy
        Tensor add_to = {};       // what dx is added to: another reader's gradient came first
        // Where a second input's gradient goes that is dy itself: copied, or added where another
        // came first; or what dx2 is added to.
        Tensor second_gradient = {};
        bool second_adds = false;
        int phases = 1;
        bool together = false;
        // In evaluations, bytes from one chunk to the next where a value has room for the whole
        // batch; 0: it has room for one chunk, which the next one overwrites.
        std::size_t x_chunk = 0, x2_chunk = 0, y_chunk = 0;
    };
    struct Plan;  // while the net is made

    StepStats* stats_in(float* gradients) const {
        return reinterpret_cast<StepStats*>(gradients + stats_offset());
    }
    const Step& step_of(const Batch& batch, std::size_t node) const {
        return steps_[static_cast<std::size_t>(batch.leaf) * ops_.size() + node];
    }
    // The three steps of a node's backward pass: the gradients of its parameters; those of its
    // inputs; and the sums of these with other readers' gradients, or the update of parameters
    // whose gradients the first step has left out.
    void backward_weights(std::size_t node, const Batch& batch, const BackwardHooks& hooks);
    bool prepare_inputs(std::size_t node, const Batch& batch);
    void backward_inputs(std::size_t node, const Batch& batch);
    // The first two for all leaves together.
    void backward_together(std::size_t node, std::span<const Batch> leaves,
                           const BackwardHooks& hooks);
    Leaves at_node(std::size_t node, std::span<const Batch> leaves) const {
        return {leaves, leaf_ios_.data() + node * static_cast<std::size_t>(places_)};
    }
    const Tensor& logits(const Batch& batch) const {
        const Step& step = step_of(batch, ops_.size() - 1);
        return batch.training ? step.train.y : step.eval.y;
    }
    void backward_sums(std::size_t node, const Batch& batch, const BackwardHooks& hooks);
    bool updates(std::size_t node, const Batch& batch, const BackwardHooks& hooks) const;
    // Gives dy to a node's second input.
    void pass_on(const Batch& batch, const Step& step, const Node& node);
    // Runs nodes [first, last) forward on leaves, or on a chunk of an evaluation's images.
    void run_forward(std::size_t first, std::size_t last, std::span<const Batch> leaves,
                     std::size_t chunk = 0);
    // y += x, of n images.
    void add(const Shape& shape, int n, const Tensor& x, const Tensor& y);
    void make_operations(const NetOptions& options);
    void count_leaves(const NetOptions& options);
    void make_head(const NetOptions& options);
    void place_parameters(const NetOptions& options);
    void find_fusable_layers(const Graph& fused, int most_images);
    // A tensor of parameters or state, and its place.
    struct Placed {
        const Parameter& tensor;
        float* data;
    };
    std::vector<Placed> all_tensors() const;
    void upload(const Placed& placed, const std::vector<float>& values) {
        backend_.upload(placed.data, values.data(), values.size() * sizeof(float));
    }
    void place_activations(const NetOptions& options);
    void alias_values(Plan& plan) const;
    void plan_training(Plan& plan, const NetOptions& options);
    void plan_gradients(Plan& plan, const NetOptions& options, const std::vector<bool>& wanted);
    void choose_chunk(const NetOptions& options);
    void plan_evaluation(Plan& plan, const NetOptions& options) const;
    void bind(const Plan& plan, int leaf);
    std::size_t activation_bytes(const Shape& shape, int n) const;  // of values in type_
    const Shape& shape_of(int value) const;

    Backend& backend_;
    Shape input_shape_;
    int classes_;
    const LossSpec loss_;
    const DataType type_;
    WideMemory wide_;  // where type_ is a 16-bit one
    Graph graph_;
    std::vector<Fold> folds_;
    std::vector<Parameter> whole_;  // the tensors of the graph before folds_, if there are some
    std::vector<std::unique_ptr<Op>> ops_;  // of each node
    bool meets_ = false;                    // leaves meet in some operation
    int leaves_ = 1, places_ = 1;           // places: with a guest's
    std::vector<Step> steps_;               // [places][nodes]
    // In evaluations, so many nodes run on so many images at a time, whose values then stay in the
    // processor's caches; 0: none do.
    std::size_t chunked_nodes_ = 0;
    int eval_chunk_ = 0;  // whole blocks of the backend's layout
    std::optional<TrainingPassSpec> fusable_layers_;
    std::unique_ptr<LossHead> head_;  // of training passes: the last operation with the loss
    std::vector<Parameter> parameters_, state_;
    std::vector<std::int64_t> layer_begins_;
    std::int64_t flat_elems_ = 0;
    DeviceBuffer<float> flat_parameters_, flat_gradients_, flat_state_;
    std::vector<const OpIo*> leaf_ios_;  // [node][place]
    DeviceBuffer<float> unused_state_;   // of all leaves but the first
    DeviceBuffer<float> guest_gradients_;
    DeviceBuffer<std::byte> input_;
    DeviceBuffer<std::byte> arena_;
    DeviceBuffer<std::int32_t> labels_;
    // From a leaf's to the next one's.
    std::ptrdiff_t input_leaf_bytes_ = 0, arena_leaf_bytes_ = 0, labels_leaf_elems_ = 0;
    DeviceBuffer<float> class_weights_;  // those of loss_, if it has any
};

}  // namespace gyre::model
