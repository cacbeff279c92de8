#include "train/factors.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace gyre::train {

std::vector<FactoredLayer> choose_factored(const Net& net, Backend& backend,
                                           const Communicator& comm, std::int64_t most_images,
                                           FactorUse use) {
    std::vector<FactoredLayer> chosen;
    const bool several_hosts = comm.local_size() < comm.size();
    if (use == FactorUse::off || comm.size() == 1 || !backend.host_memory() ||
        (use == FactorUse::automatic && !several_hosts)) {
        return chosen;
    }
    const double ranks = comm.size();
    for (std::size_t i = 0; i < net.nodes().size(); ++i) {
        const Node& node = net.nodes()[i];
        if (!node.factored()) {
            continue;
        }
        const auto in = static_cast<double>(node.in.elems());
        const auto out = static_cast<double>(node.out.elems());
        const double reduced = 2.0 * (ranks - 1.0) / ranks * in * out;
        const double gathered = (ranks - 1.0) * static_cast<double>(most_images) * (in + out);
        if (gathered < (use == FactorUse::on ? 1.0 : 0.5) * reduced) {
            const Parameter& last = node.parameters.back();
            const std::int64_t end = last.offset_elems + last.elems;
            const std::int64_t aligned =
                (end + Net::kAlignElems - 1) / Net::kAlignElems * Net::kAlignElems;
            chosen.push_back({i, {node.parameters.front().offset_elems, aligned}});
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

Factors::Factors(Backend& backend, Net& net, Communicator& comm, Reducer& reducer,
                 const std::vector<FactoredLayer>& layers, std::int64_t most_images)
    : backend_(backend), net_(net), reducer_(reducer), rank_(comm.rank()), ranks_(comm.size()) {
    for (const FactoredLayer& which : layers) {
        const auto elems = [&](const Shape& shape) {
            return backend.activation_elems(shape, static_cast<int>(most_images));
        };
        const Node& node = net.nodes()[which.node];
        const std::int64_t x = elems(node.in), dy = elems(node.out);
        gathered_.push_back({which, {backend, x * ranks_}, {backend, dy * ranks_}, x, dy});
    }
}

// A share of fewer images than the slot holds is filled up with zeros, which add nothing.
void Factors::put(DeviceBuffer<float>& to, std::int64_t slot_elems, const Shape& shape, int n,
                  const float* from) {
    float* slot = to.get() + slot_elems * rank_;
    const std::int64_t elems = backend_.activation_elems(shape, n);
    std::copy_n(from, elems, slot);
    std::fill(slot + elems, slot + slot_elems, 0.0f);
}

bool Factors::take(const Batch& batch, std::size_t node, const float* x, const float* dy) {
    const auto found = std::find_if(gathered_.begin(), gathered_.end(),
                                    [&](const Gathered& g) { return g.which.node == node; });
    if (found == gathered_.end()) {
        return false;
    }
    Gathered& g = *found;
    const Shape& in = net_.nodes()[node].in;
    put(g.x, g.x_slot_elems, in, batch.n, x);
    put(g.dy, g.dy_slot_elems, net_.nodes()[node].out, batch.n, dy);
    Batch all = batch;
    all.n = static_cast<int>(g.x_slot_elems / in.elems()) * ranks_;
    reducer_.all_gather(g.x.get(), g.x_slot_elems, {}, {});
    reducer_.all_gather(g.dy.get(), g.dy_slot_elems, g.which.range, [this, &g, all] {
        net_.backward_params(g.which.node, all, g.x.get(), g.dy.get());
    });
    return true;
}

void Factors::gather_alone() {
    for (Gathered& g : gathered_) {
        for (auto [buffer, slot_elems] :
             {std::pair{&g.x, g.x_slot_elems}, {&g.dy, g.dy_slot_elems}}) {
            reducer_.all_gather(buffer->get(), slot_elems, {}, {});
        }
    }
}

std::string Factors::summary() const {
    std::string text;
    for (const Gathered& g : gathered_) {
        text += fmt::format(
            "{}: {:.1f} KiB of factors gathered from each rank, instead of {:.1f} KiB reduced\n",
            net_.nodes()[g.which.node].name,
            static_cast<double>((g.x_slot_elems + g.dy_slot_elems) * 4) / 1024.0,
            static_cast<double>(g.which.range.bytes()) / 1024.0);
    }
    return text;
}

}  // namespace gyre::train
