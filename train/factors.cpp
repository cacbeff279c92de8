#include "train/factors.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "data/sampler.hpp"

namespace gyre::train {
namespace {

// On GPUs, where links are fast: the part of the bytes below which the other ranks' arithmetic
// costs less than is saved (`wide`'s fc1 at 64 images a rank and 2 ranks: 200 us of NVLink at 400
// GB/s by estimate, against 10 of tensor cores); and the elements of a gradient whose reduction
// takes longer than the latency of two more collectives.
constexpr double kMostOnGpu = 0.25, kLeastElemsOnGpu = 4 << 20;

}  // namespace

bool may_gather(const Communicator& comm, FactorUse use, bool on_gpu) {
    const bool several_hosts = comm.local_size() < comm.size();
    return comm.size() > 1 &&
           (use == FactorUse::on || (use == FactorUse::automatic && (several_hosts || on_gpu)));
}

std::vector<FactoredLayer> choose_factored(const Net& net, const Backend& backend,
                                           const Communicator& comm, const FactorBatch& batch,
                                           FactorUse use, bool on_gpu) {
    std::vector<FactoredLayer> chosen;
    if (!may_gather(comm, use, on_gpu)) {
        return chosen;
    }
    const double ranks = comm.size();
    const double most = use == FactorUse::on ? 1.0 : on_gpu ? kMostOnGpu : 0.5;
    const double least = use == FactorUse::automatic && on_gpu ? kLeastElemsOnGpu : 0.0;
    for (std::size_t i = 0; i < net.nodes().size(); ++i) {
        const Node& node = net.nodes()[i];
        if (!node.factored() || net.with_loss(i) || (batch.shards > 0 && !net.takes_together(i))) {
            continue;
        }
        const auto in = static_cast<double>(node.in.elems());
        const auto out = static_cast<double>(node.out.elems());
        const double reduced = 2.0 * (ranks - 1.0) / ranks * in * out;
        const double gathered = (ranks - 1.0) * batch.passes *
                                static_cast<double>(batch.slot_elems(backend, node.in) +
                                                    batch.slot_elems(backend, node.out));
        if (gathered < most * reduced && in * out >= least) {
            const Net::FlatRange range = Net::flat_range(node);
            chosen.push_back({i, {range.begin, range.end}});
        }
    }
    return chosen;
}

std::vector<Bucket> ranges_of(const std::vector<FactoredLayer>& layers) {
    std::vector<Bucket> ranges;
    for (const FactoredLayer& layer : layers) {
        ranges.push_back(layer.range);
    }
    return ranges;
}

Factors::Factors(Backend& backend, Net& net, Communicator& comm,
                 const std::vector<FactoredLayer>& layers, const FactorBatch& batch)
    : backend_(backend),
      net_(net),
      rank_(comm.rank()),
      ranks_(comm.size()),
      batch_(batch),
      products_(static_cast<std::size_t>(std::max(batch.shards, 1))) {
    const std::int64_t slots = std::int64_t{ranks_} * batch.passes;
    for (const FactoredLayer& which : layers) {
        const Node& node = net.nodes()[which.node];
        const std::int64_t x = batch.slot_elems(backend, node.in);
        const std::int64_t dy = batch.slot_elems(backend, node.out);
        Gathered& g = gathered_.emplace_back(
            Gathered{which, {backend, x * slots}, {backend, dy * slots}, x, dy, {}, {}});
        g.io.assign(products_.size(), net.gradient_io(which.node));
        int product = 0;
        for (int rank = 0; rank < ranks_; ++rank) {
            const auto own =
                static_cast<int>(rank_share(std::ssize(products_), rank, ranks_).count);
            for (int pass = 0; pass < own; ++pass) {
                const int slot = rank * batch.passes + pass;
                OpIo& io = g.io[static_cast<std::size_t>(product++)];
                io.x = g.x.get() + slot * x;
                io.dy = g.dy.get() + slot * dy;
            }
        }
        for (const OpIo& io : g.io) {
            g.io_list.push_back(&io);
        }
    }
}

// A pass of fewer images than the slot holds is filled up with zeros, which add nothing.
void Factors::put(float* slot, std::int64_t slot_elems, const Shape& shape, int n,
                  const Tensor& from) {
    const std::int64_t elems = backend_.activation_elems(shape, n);
    if (from.type == DataType::float32) {
        backend_.copy(slot, from.f32(), static_cast<std::size_t>(elems) * sizeof(float));
    } else {
        backend_.widen(from.type, elems, from.narrow(), slot);
    }
    if (elems < slot_elems) {
        backend_.fill_zero(slot + elems,
                           static_cast<std::size_t>(slot_elems - elems) * sizeof(float));
    }
}

bool Factors::operator()(const Batch& leaf, std::size_t node, const Tensor& x, const Tensor& dy) {
    const auto found = std::find_if(gathered_.begin(), gathered_.end(),
                                    [&](const Gathered& g) { return g.which.node == node; });
    if (found == gathered_.end()) {
        return false;
    }
    Gathered& g = *found;
    const Shape& in = net_.nodes()[node].in;
    const int slot = rank_ * batch_.passes + leaf.leaf;
    put(g.x.get() + slot * g.x_slot_elems, g.x_slot_elems, in, leaf.n, x);
    put(g.dy.get() + slot * g.dy_slot_elems, g.dy_slot_elems, net_.nodes()[node].out, leaf.n, dy);
    // The products are of the same images in all layers. The last of these comes first.
    if (&g == &gathered_.back() && leaf.leaf == 0) {
        int shard = 0;
        for (Batch& product : products_) {
            product = leaf;
            product.n = static_cast<int>(
                batch_.shards == 0 ? g.x_slot_elems / in.elems() * ranks_
                                   : rank_share(leaf.global_n, shard++, batch_.shards).count);
        }
    }
    return true;
}

std::size_t Factors::index_of(const Bucket& bucket) const {
    std::size_t index = 0;
    while (gathered_[index].which.range.begin != bucket.begin) {
        ++index;
    }
    return index;
}

Collective Factors::collective(const Bucket& bucket, int index) const {
    const Gathered& g = gathered_[index_of(bucket)];
    return {.kind = Collective::Kind::all_gather,
            .data = index == 0 ? g.x.get() : g.dy.get(),
            .count = batch_.passes * (index == 0 ? g.x_slot_elems : g.dy_slot_elems)};
}

void Factors::unpack(const Bucket& bucket) {
    const Gathered& g = gathered_[index_of(bucket)];
    if (!alone_) {
        net_.backward_params(g.which.node, {products_, g.io_list.data()});
    }
}

std::string Factors::summary() const {
    std::string text;
    for (const Gathered& g : gathered_) {
        text += fmt::format(
            "{}: {:.1f} KiB of factors gathered from each rank, instead of {:.1f} KiB reduced\n",
            net_.nodes()[g.which.node].name,
            static_cast<double>((g.x_slot_elems + g.dy_slot_elems) * batch_.passes * 4) / 1024.0,
            static_cast<double>(g.which.range.bytes()) / 1024.0);
    }
    return text;
}

}  // namespace gyre::train
