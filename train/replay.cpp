#include "train/replay.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <span>

#include "kernels/ops/step.hpp"

namespace gyre::train {
namespace {

double norm(std::span<const float> values) {
    double squares = 0.0;
    for (const float value : values) {
        squares += double{value} * double{value};
    }
    return std::sqrt(squares);
}

// Returns the loss of image i of n from its logits [classes], by the formula of CrossEntropyArgs.
ReplayedImage judge(const CrossEntropyArgs& args, int n, int i, const float* logits) {
    const float* const end = logits + args.classes;
    const float* const largest = std::max_element(logits, end);
    double sum = 0.0, total = 0.0;
    for (const float* logit = logits; logit != end; ++logit) {
        sum += std::exp(double{*logit} - double{*largest});
        total += double{*logit};
    }
    LossTarget targets[2];
    const int count = find_targets(args, n, i, targets);
    ReplayedImage image{.label = targets[0].label, .predicted = static_cast<int>(largest - logits)};
    for (int t = 0; t < count; ++t) {
        const double own = double{logits[targets[t].label]};
        image.loss += double{targets[t].weight} *
                      (std::log(sum) + double{*largest} - own +
                       double{args.label_smoothing} * (own - total / args.classes));
    }
    return image;
}

// Returns the images of the step that comes next. As the step itself keeps no logits, they come
// from another net with the same parameters and passes.
std::vector<ReplayedImage> images_of_next(const Training& training) {
    Session& session = training.session;
    Backend& backend = session.backend();
    Communicator& comm = session.communicator();
    const Sharding& sharding = session.sharding();
    std::unique_ptr<Net> made;
    agree(comm, [&] { made = session.net_with_logits(); });
    Net& net = *made;
    const Net& trained = session.net();
    backend.copy(net.parameter_data(), trained.parameter_data(),
                 static_cast<std::size_t>(trained.flat_elems()) * sizeof(float));
    if (trained.state_elems() > 0) {
        backend.copy(net.state_data(), trained.state_data(),
                     static_cast<std::size_t>(trained.state_elems()) * sizeof(float));
    }

    const StepProgram program(backend, net, session.images(), session.run().batch.augment, false);
    const EpochPlace now = {.epoch = static_cast<std::uint32_t>(training.cursor.epoch),
                            .step = static_cast<std::uint32_t>(training.cursor.step)};
    DeviceBuffer<EpochPlace> place(backend, 1);
    backend.upload(place.get(), &now, sizeof now);
    const Range global = sharding.global(training.cursor.step);
    const Range share = sharding.share(global.count);
    DeviceBuffer<std::int32_t> samples(backend, sharding.most_local());
    const StepBatches batches(sharding, session.run(), place.get(), &session.reducer());
    backend.next_samples(batches.next_samples(global.count), static_cast<int>(share.count),
                         samples.get());
    std::vector<std::int32_t> indices(static_cast<std::size_t>(share.count));
    backend.download(indices.data(), samples.get(), indices.size() * sizeof(std::int32_t));

    const LossSpec& loss = net.loss_spec();
    constexpr std::size_t kFields = 4;
    std::vector<double> table(static_cast<std::size_t>(global.count) * kFields);
    const MicroBatches& parts = session.micro_batches();
    for (int first = 0; first < parts.passes(); first += net.leaves()) {
        std::vector<Batch> leaves;
        for (int leaf = 0; leaf < net.leaves(); ++leaf) {
            const MicroBatches::Pass part = parts.pass(global.count, first + leaf);
            StepProgram::Pass pass{.batch = batches.batch(part, samples.get()),
                                   .samples = samples.get() + part.images.first};
            pass.batch.leaf = leaf;
            pass.batch.leaves = net.leaves();
            program.gather(pass);
            leaves.push_back(pass.batch);
        }
        net.forward(leaves);
        for (const Batch& batch : leaves) {
            const std::vector<float> logits = net.export_logits(batch);
            std::vector<std::int32_t> labels(static_cast<std::size_t>(batch.n) *
                                             (loss.mixed ? 3 : 1));
            backend.download(labels.data(), net.labels(batch.leaf),
                             labels.size() * sizeof(std::int32_t));
            const CrossEntropyArgs args{
                .classes = training.classes,
                .labels = labels.data(),
                .label_smoothing = loss.label_smoothing,
                .class_weights = loss.class_weights.empty() ? nullptr : loss.class_weights.data(),
                .mixed = loss.mixed};
            for (int i = 0; i < batch.n; ++i) {
                const std::ptrdiff_t at = batch.samples - samples.get() + i;
                const ReplayedImage image =
                    judge(args, batch.n, i, logits.data() + std::ptrdiff_t{i} * training.classes);
                double* const row =
                    table.data() + static_cast<std::size_t>(share.first + at) * kFields;
                row[0] = indices[static_cast<std::size_t>(at)];
                row[1] = image.label;
                row[2] = image.predicted;
                row[3] = image.loss;
            }
        }
    }
    comm.allreduce_sum(table);  // each row is one rank's: the sums are exact
    std::vector<ReplayedImage> images;
    for (std::size_t at = 0; at < table.size(); at += kFields) {
        images.push_back({static_cast<std::int64_t>(table[at]), static_cast<int>(table[at + 1]),
                          static_cast<int>(table[at + 2]), table[at + 3]});
    }
    return images;
}

// Returns the norm of each parameter's gradient, whichever rank has the sums of which part.
std::vector<double> gradient_norms(Session& session) {
    Net& net = session.net();
    Communicator& comm = session.communicator();
    std::vector<float> gradients(static_cast<std::size_t>(net.flat_elems()));
    session.backend().download(gradients.data(), net.gradient_data(),
                               gradients.size() * sizeof(float));
    std::vector<double> squares;
    for (const Parameter& parameter : net.parameters()) {
        double sum = 0.0;
        for (const Bucket& range :
             updated_by(comm.rank(), session.reducer().buckets(), net.flat_elems())) {
            const std::int64_t begin = std::max(range.begin, parameter.offset_elems);
            const std::int64_t end = std::min(range.end, parameter.offset_elems + parameter.elems);
            if (begin < end && (range.shared() || comm.is_root())) {
                const double part = norm(std::span(gradients).subspan(
                    static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin)));
                sum += part * part;
            }
        }
        squares.push_back(sum);
    }
    comm.allreduce_sum(squares);
    std::transform(squares.begin(), squares.end(), squares.begin(),
                   [](double value) { return std::sqrt(value); });
    return squares;
}

}  // namespace

void Replay::on_start(const Training& training) {
    if (training.steps() >= number_) {
        throw AgreedError(
            ExitCode::bad_input,
            fmt::format("{}: its training is at step {} already, after step {}; begin from an "
                        "earlier checkpoint, or from the start",
                        training.run.checkpoints.resume, training.steps(), number_));
    }
    look(training);
}

void Replay::on_pause(const Training& training) {
    look(training);
}

void Replay::look(const Training& training) {
    // After the last step of an epoch its evaluation comes first, which may change the rate.
    if (training.steps() == number_ - 1 &&
        training.cursor.step < training.session.sharding().steps()) {
        step_ = {.epoch = training.cursor.epoch, .images = images_of_next(training)};
        training.session.net().visit_parameters([&](const std::string& name,
                                                    const std::vector<std::int64_t>&,
                                                    std::span<const float> values) {
            before_[name] = {values.begin(), values.end()};
        });
        training.session.trainer().keep_gradients();
    }
    if (training.steps() == number_ && !done_) {
        finish(training.session);
    }
}

void Replay::on_step(const Training& training, const StepResult& result) {
    if (step_ && training.cursor.epoch == step_->epoch &&
        training.steps_before({.epoch = step_->epoch, .step = result.step}) == number_ - 1) {
        step_->result = result;
    }
}

void Replay::finish(Session& session) {
    const std::vector<double> gradients = gradient_norms(session);
    std::map<std::string, double> norms;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
        norms[session.net().parameters()[i].name] = gradients[i];
    }
    session.net().visit_parameters([&](const std::string& name,
                                       const std::vector<std::int64_t>& shape,
                                       std::span<const float> values) {
        const auto gradient = norms.find(name);
        if (gradient == norms.end()) {
            return;  // a running statistic
        }
        std::vector<float> change(values.begin(), values.end());
        const std::vector<float>& before = before_.at(name);
        std::transform(change.begin(), change.end(), before.begin(), change.begin(),
                       std::minus<>());
        step_->parameters.push_back({name, shape, norm(before), gradient->second, norm(change)});
    });
    done_ = true;
}

}  // namespace gyre::train
