#include "comm/gradient_transport.hpp"

namespace gyre::comm {

GradientTransport::GradientTransport(Communicator& comm, Device& device, float* gradients,
                                     std::int64_t elems, DataType type, std::int64_t exact_from,
                                     SumOrder order)
    : device_(device),
      rank_(comm.rank()),
      ranks_(comm.size()),
      order_(order),
      gradients_(gradients),
      type_(type),
      exact_from_(exact_from) {
    if (comm.size() == 1) {
        return;
    }
    if (type_ != DataType::float32) {
        narrow_ = {device, elems};
    }
    if (order_ == SumOrder::tree) {
        gathered_ = {device, ranks_ * elems};
    }
    if (!comm.use_device(device)) {
        staging_ = {device, rows() * elems};
    }
}

void* GradientTransport::on_device(const Bucket& bucket) const {
    if (order_ == SumOrder::tree) {
        return gathered_.get() + ranks_ * bucket.begin;
    }
    if (narrow(bucket)) {
        return narrow_.get() + bucket.begin;
    }
    return gradients_ + bucket.begin;
}

Device::Event GradientTransport::pack(const Bucket& bucket) {
    if (order_ == SumOrder::tree) {
        const auto bytes = static_cast<std::size_t>(bucket.bytes());
        const std::int64_t own = rank_ * bucket.elems();
        const float* from = gradients_ + bucket.begin;
        if (direct()) {
            device_.copy(static_cast<float*>(on_device(bucket)) + own, from, bytes);
            return 0;
        }
        return device_.download_async(Device::Stream::copy,
                                      static_cast<float*>(on_host(bucket)) + own, from, bytes);
    }
    if (narrow(bucket)) {
        device_.narrow(type_, bucket.elems(), gradients_ + bucket.begin,
                       narrow_.get() + bucket.begin);
    }
    return direct()
               ? 0
               : device_.download_async(Device::Stream::copy, on_host(bucket), on_device(bucket),
                                        static_cast<std::size_t>(bytes_of(reduction(bucket))));
}

Collective GradientTransport::reduction(const Bucket& bucket) const {
    if (order_ == SumOrder::tree) {
        return {.kind = Collective::Kind::all_gather,
                .data = direct() ? on_device(bucket) : on_host(bucket),
                .count = bucket.elems()};
    }
    return {
        .kind = bucket.shared() ? Collective::Kind::reduce_scatter : Collective::Kind::all_reduce,
        .data = direct() ? on_device(bucket) : on_host(bucket),
        .count = bucket.shared() ? bucket.share_elems : bucket.elems(),
        .type = narrow(bucket) ? type_ : DataType::float32};
}

void GradientTransport::receive(const Bucket& bucket) {
    if (!direct()) {
        device_.wait(
            device_.upload_async(Device::Stream::copy, on_device(bucket), on_host(bucket),
                                 static_cast<std::size_t>(rows() * bytes_of(reduction(bucket)))));
    }
}

// The own gradients already lie where the sum is to be, so each level adds the sum of the
// neighbouring subtree to them. Both neighbours then have the same bits, as a + b is b + a.
void GradientTransport::add_tree(const Bucket& bucket) {
    const std::int64_t elems = bucket.elems();
    const auto row = [&](int rank) {
        return static_cast<float*>(on_device(bucket)) + rank * elems;
    };
    for (int width = 1; width < ranks_; width *= 2) {
        const int first = (rank_ / width ^ 1) * width;
        for (int step = 1; step < width; step *= 2) {
            for (int left = first; left < first + width; left += 2 * step) {
                device_.add(elems, row(left + step), row(left));
            }
        }
        device_.add(elems, row(first), gradients_ + bucket.begin);
    }
}

void GradientTransport::unpack(const Bucket& bucket) {
    if (order_ == SumOrder::tree) {
        add_tree(bucket);
        return;
    }
    if (narrow(bucket)) {
        const Bucket summed = bucket.shared() ? bucket.share(rank_) : bucket;
        device_.widen(type_, summed.elems(), narrow_.get() + summed.begin,
                      gradients_ + summed.begin);
    }
}

}  // namespace gyre::comm
