// The update rules of kUpdateRules over the flat parameter buffer of a net.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/function_ref.hpp"
#include "comm/reducer.hpp"
#include "model/net.hpp"
#include "train/optimizer_spec.hpp"
#include "train/parameter_groups.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// Throws Error(usage) for what a rule or a schedule cannot have.
void check(const OptimizerSpec& spec);

class Optimizer {
 public:
    static constexpr const char* kStepRest = "step_rest";

    // Throws as check() does. most_steps: of a call to next_steps(). reducer: of the gradients;
    // null: they are all here. Of its buckets, ranks may share updates out (ZeRO stage 1,
    // torch.distributed.optim.ZeroRedundancyOptimizer): of a bucket that is shared out this rank
    // updates its own share, has moments for no other, and gathers the parameters of the others.
    // The reducer then outlives the optimiser.
    Optimizer(Backend& backend, Net& net, const OptimizerSpec& spec, int most_steps = 1,
              Reducer* reducer = nullptr);

    // Counts steps and writes what their updates read to the device, which is asked for it before
    // the steps themselves, captured or not. pinned: [steps], on the way there, so it must stay as
    // it is until the device has done them.
    void next_steps(StepScalars* pinned, int steps);
    // Step `index` of them: updates each parameter from its reduced gradient, as soon as that has
    // arrived, or at the end if something must be known of all gradients first. not_finite:
    // FiniteCheck's word, on the device.
    void begin_step(std::int32_t* not_finite, int index = 0);
    // Both are called within Reducer::finish_step(), if there is a reducer.
    void arrived(const Bucket& bucket);
    void end_step();
    // The factor of the loss's gradient, on the device; null: 1.
    const float* loss_scale() const {
        return scaling_.get() == nullptr ? nullptr : &scaling_.get()->scale;
    }
    // After begin_step(), for a pass that may update parameters itself: with what, good until the
    // next call; null where something else comes first. updated(): it has done so with these,
    // which arrived() then leaves alone; called from the end of the parameters on.
    const UpdateArgs* in_pass();
    void updated(std::int64_t begin, std::int64_t end);

    // All that further steps build on besides the parameters, as host tensors: `step`, a scalar,
    // the steps done so far, rounded to float32 as PyTorch's, with `step_rest`, what the rounding
    // left (states without it have 0), and for each parameter, in its shape, the rule's states by
    // PyTorch's names, such as NAME.exp_avg, and NAME.ema; of a scaled loss, scalars by the names
    // of GradScaler's state, `scaler.scale` and `scaler._growth_tracker`, and `scaler.skipped`; of
    // schedule plateau `scheduler.best`, `.num_bad_epochs`, `.falls`. Collective where updates are
    // shared out: all ranks get all. visit_state() does not copy what the host can read in place.
    std::vector<HostTensor> export_state() const;
    void visit_state(const TensorVisitor& visit) const;
    // Calls visit(name, first_elem, values, on_all_ranks) for what this rank has of that: slices of
    // the tensors, from elements on that are multiples of 16, and an empty one of each.
    using SliceVisitor =
        FunctionRef<void(const std::string&, std::int64_t, std::span<const float>, bool)>;
    void visit_slices(const SliceVisitor& visit) const;
    // Calls body() with the moving average of the parameters in the net, frozen ones as they are,
    // if there is one; else with the net as it is. After next_steps(), and between steps.
    // Collective where updates are shared out.
    void with_average(FunctionRef<void()> body);
    bool averages() const { return spec_.ema.has_value(); }
    // For schedule plateau, after an epoch, before the next one's steps; the same loss on all
    // ranks.
    void evaluated(double loss);
    bool shared_out() const { return !shared_.empty(); }
    // Elements of each moment that this rank has memory for.
    std::int64_t moment_elems() const { return states_.empty() ? 0 : states_.front().elems(); }
    // Goes on from such a state, which all ranks must be given alike. Throws Error(bad_input)
    // unless it has these tensors, in these shapes, and no others; `source` says where they come
    // from.
    void import_state(const std::vector<HostTensor>& tensors, const std::string& source);

 private:
    struct Range {
        std::int64_t begin, end, moment;  // where its moments begin
        bool counted;                     // by this rank, in the norm of all gradients
        Scales scales;
        std::int64_t elems() const { return end - begin; }
    };
    int rank() const { return shared_out() ? reducer_->communicator().rank() : 0; }
    int ranks() const { return shared_out() ? reducer_->communicator().size() : 1; }
    // Returns whether the states are those of all parameters, in the order of these.
    bool has_all() const {
        return ranges_.size() == 1 && ranges_.front().elems() == net_.flat_elems();
    }
    // Scales what has arrived, and decides whether it leads to an update.
    void finish_gradients();
    // All that is kept for each parameter, by its name in exported states.
    std::vector<std::pair<const char*, float*>> kept() const;
    void visit_scalars(const TensorVisitor& visit) const;
    // One of these over the flat buffer, from all ranks; 0 for frozen parameters.
    std::vector<float> download(const float* state) const;
    void update(std::int64_t begin, std::int64_t end);
    void move_average();
    // The updated parameters of a bucket that is shared out, from all ranks.
    void gather(const Bucket& bucket);
    // True if all gradients must be known before any parameter is updated.
    bool waits() const { return spec_.max_grad_norm || spec_.loss_scaling; }
    void update_around(const Range& range, std::int64_t begin, std::int64_t end);
    // But for the gap, which is counted from begin.
    void update_range(const Range& range, std::int64_t begin, std::int64_t end,
                      const UpdateGap& gap);
    StepScalars scalars(std::int64_t step) const;

    Backend& backend_;
    Net& net_;
    Reducer* const reducer_;
    const std::vector<Bucket> shared_;   // buckets
    const std::vector<Range> ranges_;    // that this rank updates, ascending
    const OptimizerSpec spec_;           // with no optional value empty that has a default
    DeviceBuffer<StepScalars> scalars_;  // [most_steps]
    std::vector<StepScalars> written_;   // there, as far as anything has been
    std::int64_t steps_ = 0;             // begun
    Plateau plateau_;                    // of that schedule
    DeviceBuffer<LossScale> scaling_;    // [1], if the loss is scaled
    LossScaleArgs decision_;             // if the loss is scaled
    DeviceBuffer<GradientFacts> facts_;  // [ranks()], if waits()
    UpdateArgs update_;                  // with the states of the first element
    std::int32_t* clip_word_ = nullptr;  // FiniteCheck's
    std::vector<Bucket> updated_;        // by the step's pass, ascending, apart from each other
    std::vector<DeviceBuffer<float>> states_;  // as many as the formula has
    DeviceBuffer<float> average_;              // as a state, if `ema` asks for it
    DeviceBuffer<StepScalars> average_step_;   // [1], likewise
};

}  // namespace gyre::train
