#include "train/evaluator.hpp"

#include <algorithm>
#include <array>

#include "data/sampler.hpp"
#include "train/interrupt.hpp"

namespace gyre::train {

int evaluation_batch(const Communicator& comm, std::int64_t images, int most) {
    return static_cast<int>(std::min<std::int64_t>(most, rank_share(images, 0, comm.size()).count));
}

std::vector<int> evaluation_sizes(const Communicator& comm, std::int64_t images, int batch) {
    return Sharding{rank_share(images, comm.rank(), comm.size()).count, batch}.sizes();
}

Evaluation evaluate(Communicator& comm, Backend& backend, Net& net, const DeviceImages& images,
                    int batch) {
    const Range mine = rank_share(images.count(), comm.rank(), comm.size());
    DeviceBuffer<float> sums(backend, 2);
    DeviceBuffer<EpochPlace> place(backend, 1);
    DeviceBuffer<std::int32_t> samples(backend, batch);
    const NextSamplesArgs in_order = {.order = EpochOrder(0, images.count(), false),
                                      .place = place.get(),
                                      .step_images = batch,
                                      .first = mine.first};
    enum Total { kLoss, kCorrect, kImages, kStop, kTotalCount };
    std::array<double, kTotalCount> totals{};
    for (std::int64_t done = 0; done < mine.count && !interrupt_requested(); done += batch) {
        Batch pass;
        pass.n = static_cast<int>(std::min<std::int64_t>(batch, mine.count - done));
        images.gather_next(in_order, samples.get(), pass.n, net.input(), net.labels());
        net.forward(pass);
        net.loss(pass, 1.0f, sums.get());
        std::array<float, 2> batch_sums{};
        backend.download(batch_sums.data(), sums.get(), sums.bytes());
        totals[kLoss] += double{batch_sums[0]};
        totals[kCorrect] += double{batch_sums[1]};
        totals[kImages] += pass.n;
    }
    totals[kStop] = interrupt_requested() ? 1.0 : 0.0;
    comm.allreduce_sum(totals);
    Evaluation result;
    result.correct = static_cast<std::int64_t>(totals[kCorrect]);
    result.images = static_cast<std::int64_t>(totals[kImages]);
    result.loss = totals[kLoss] / totals[kImages];
    result.accuracy = totals[kCorrect] / totals[kImages];
    result.stop = totals[kStop] > 0.0;
    return result;
}

}  // namespace gyre::train
