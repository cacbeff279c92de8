#include "train/evaluator.hpp"

#include <algorithm>
#include <array>
#include <vector>

#include "data/sampler.hpp"
#include "train/interrupt.hpp"

namespace gyre::train {

namespace {
enum Total { kLoss, kCorrect, kImages, kStop, kTotalCount };
using Totals = std::array<double, kTotalCount>;

// After forward() of a pass: its logits become the mean of theirs and those of the mirrored images.
// place: any one, on the device.
void add_mirrored(Net& net, const DeviceImages& images, const std::int32_t* samples,
                  const EpochPlace* place, const Batch& pass) {
    const std::vector<float> plain = net.export_logits(pass);
    images.gather(samples, pass.n, net.input(), net.labels(),
                  {.spec = {.flip = Flip::always}, .epoch = &place->epoch});
    net.forward(pass);
    std::vector<float> mean = net.export_logits(pass);
    for (std::size_t i = 0; i < mean.size(); ++i) {
        mean[i] = 0.5f * (plain[i] + mean[i]);
    }
    net.import_logits(pass, mean);
}

// Evaluates the images [first, first + count), in the order of the set.
Totals evaluate_range(Backend& backend, Net& net, const DeviceImages& images, const Range& range,
                      const EvaluationPasses& passes, const Look& look,
                      const std::function<void(int)>& passed) {
    const int batch = passes.batch;
    DeviceBuffer<float> sums(backend, 2);
    DeviceBuffer<EpochPlace> place(backend, 1);
    DeviceBuffer<std::int32_t> samples(backend, batch);
    const NextSamplesArgs in_order = {.order = EpochOrder(0, images.count(), false),
                                      .place = place.get(),
                                      .step_images = batch,
                                      .first = range.first};
    Totals totals{};
    for (std::int64_t done = 0; done < range.count && !interrupt_requested(); done += batch) {
        Batch pass;
        pass.n = static_cast<int>(std::min<std::int64_t>(batch, range.count - done));
        images.gather_next(in_order, samples.get(), pass.n, net.input(), net.labels());
        net.forward(pass);
        if (passes.views == Views::mirrored) {
            add_mirrored(net, images, samples.get(), place.get(), pass);
        }
        net.loss(pass, 1.0f, sums.get());
        std::array<float, 2> batch_sums{};
        backend.download(batch_sums.data(), sums.get(), sums.bytes());
        if (look) {
            look(range.first + done, pass.n, net.export_logits(pass));
        }
        totals[kLoss] += double{batch_sums[0]};
        totals[kCorrect] += double{batch_sums[1]};
        totals[kImages] += pass.n;
        passed(pass.n);
    }
    totals[kStop] = interrupt_requested() ? 1.0 : 0.0;
    return totals;
}
}  // namespace

int evaluation_batch(const Communicator& comm, std::int64_t images, int most, int shards) {
    return static_cast<int>(std::min<std::int64_t>(
        most, rank_share(images, 0, shards > 0 ? shards : comm.size()).count));
}

std::vector<int> evaluation_sizes(const Communicator& comm, std::int64_t images, int batch,
                                  int shards) {
    const Range range =
        shards > 0 ? rank_share(images, 0, shards) : rank_share(images, comm.rank(), comm.size());
    return Sharding{range.count, batch}.sizes();
}

Evaluation evaluate(Communicator& comm, Backend& backend, Net& net, const DeviceImages& images,
                    const EvaluationPasses& passes, const Look& look, const TellDone& tell) {
    const int shards = passes.shards;
    // Totals of each shard; 0 for other ranks' shards, so that the sum over the ranks is exact.
    std::vector<double> rows(static_cast<std::size_t>(std::max(1, shards)) * kTotalCount);
    const int parts = shards > 0 ? shards : comm.size();
    const Range own = rank_share(parts, comm.rank(), comm.size());
    const auto share = [&](std::int64_t part) {
        return rank_share(images.count(), static_cast<int>(part), parts);
    };
    std::int64_t done = 0, all = 0;
    for (std::int64_t part = own.first; part < own.first + own.count; ++part) {
        all += share(part).count;
    }
    const auto passed = [&](int pass_images) {
        done += pass_images;
        if (tell) {
            tell(done, all);
        }
    };
    for (std::int64_t part = own.first; part < own.first + own.count; ++part) {
        const Totals totals =
            evaluate_range(backend, net, images, share(part), passes, look, passed);
        const std::int64_t row = shards > 0 ? part : 0;
        std::copy(totals.begin(), totals.end(), rows.begin() + row * kTotalCount);
    }
    comm.allreduce_sum(rows);
    Totals totals{};
    for (std::size_t i = 0; i < rows.size(); ++i) {
        totals[i % kTotalCount] += rows[i];
    }
    Evaluation result;
    result.correct = static_cast<std::int64_t>(totals[kCorrect]);
    result.images = static_cast<std::int64_t>(totals[kImages]);
    result.loss = totals[kLoss] / totals[kImages];
    result.accuracy = totals[kCorrect] / totals[kImages];
    result.stop = totals[kStop] > 0.0;
    return result;
}

}  // namespace gyre::train
