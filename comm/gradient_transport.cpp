#include "comm/gradient_transport.hpp"

namespace gyre::comm {

GradientTransport::GradientTransport(Communicator& comm, Device& device, float* gradients,
                                     std::int64_t elems, DataType type, std::int64_t exact_from)
    : device_(device),
      rank_(comm.rank()),
      gradients_(gradients),
      type_(type),
      exact_from_(exact_from) {
    if (comm.size() == 1) {
        return;
    }
    if (type_ != DataType::float32) {
        narrow_ = {device, elems};
    }
    if (!comm.use_device(device)) {
        staging_ = {device, elems};
        return;
    }
    registered_[0] =
        comm.register_buffer(gradients_, static_cast<std::size_t>(elems) * sizeof(float));
    if (narrow_.get() != nullptr) {
        registered_[1] = comm.register_buffer(narrow_.get(), narrow_.bytes());
    }
}

void* GradientTransport::on_device(const Bucket& bucket) const {
    if (narrow(bucket)) {
        return narrow_.get() + bucket.begin;
    }
    return gradients_ + bucket.begin;
}

Device::Event GradientTransport::pack(const Bucket& bucket) {
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
    return {
        .kind = bucket.shared() ? Collective::Kind::reduce_scatter : Collective::Kind::all_reduce,
        .data = direct() ? on_device(bucket) : on_host(bucket),
        .count = bucket.shared() ? bucket.share_elems : bucket.elems(),
        .type = narrow(bucket) ? type_ : DataType::float32};
}

void GradientTransport::receive(const Bucket& bucket) {
    if (!direct()) {
        device_.wait(device_.upload_async(Device::Stream::copy, on_device(bucket), on_host(bucket),
                                          static_cast<std::size_t>(bytes_of(reduction(bucket)))));
    }
}

void GradientTransport::unpack(const Bucket& bucket) {
    if (narrow(bucket)) {
        const Bucket summed = bucket.shared() ? bucket.share(rank_) : bucket;
        device_.widen(type_, summed.elems(), narrow_.get() + summed.begin,
                      gradients_ + summed.begin);
    }
}

}  // namespace gyre::comm
