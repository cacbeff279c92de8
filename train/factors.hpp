// Sufficient factors: the gradient of a large linear layer is dy^T x over the images of all ranks.
// Instead of reducing it (2 (ranks-1)/ranks in out elements each way) the ranks can gather x and
// dy, (ranks-1) images (in + out) elements, and each computes the sum itself. That pays for large
// layers and small batches: `wide`'s fc1 at 64 images a rank and two ranks sends 6.7 MB instead of
// 103. It costs (ranks-1) times the arithmetic of the layer's weight gradient.
// Xie et al., Distributed machine learning via sufficient factor broadcasting, UAI 2016; Zhang et
// al., Poseidon, USENIX ATC 2017.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/gradient_route.hpp"
#include "model/net.hpp"
#include "train/rooms.hpp"
#include "train/run_spec.hpp"

namespace gyre::train {

struct FactoredLayer {
    std::size_t node;  // of the net
    Bucket range;      // of its gradients
};
// The images of a step whose factors the ranks gather.
struct FactorBatch {
    int images = 0;  // the most in a pass of a rank
    int passes = 1;  // of the rank that has most, one for each of its virtual ranks
    // Virtual ranks. A product of each is added up in their tree; 0: there is one product over all
    // images.
    int shards = 0;

    // Of a slot: the activations of a pass with the most images.
    std::int64_t slot_elems(const Backend& backend, const Shape& shape) const {
        return backend.activation_elems(shape, images);
    }
};
// Whether ranks gather the factors of any layer. on_gpu: of ranks that reduce in their GPUs'
// memory, as others reduce in the host's; not for GPUs whose gradients travel through the host's.
bool may_gather(const Communicator& comm, FactorUse use, bool on_gpu);
// The layers whose factors are gathered, ascending. With virtual ranks only those that several
// leaves can go through together. on_gpu: as above.
std::vector<FactoredLayer> choose_factored(const Net& net, const Backend& backend,
                                           const Communicator& comm, const FactorBatch& batch,
                                           FactorUse use, bool on_gpu);
// Their ranges, for plan_buckets().
std::vector<Bucket> ranges_of(const std::vector<FactoredLayer>& layers);

// Route::factors, in which a bucket is a chosen layer.
class Factors final : public GradientRoute {
 public:
    Factors(Backend& backend, Net& net, Communicator& comm,
            const std::vector<FactoredLayer>& layers, const FactorBatch& batch);

    // The hook `take` of a backward pass, before the layer's bucket is ready: keeps a chosen
    // layer's factors in place of its gradients.
    bool operator()(const Batch& leaf, std::size_t node, const Tensor& x, const Tensor& dy);

    void pack(const Bucket& /*bucket*/) override {}
    int collectives() const override { return 2; }
    Collective collective(const Bucket& bucket, int index) const override;
    void unpack(const Bucket& bucket) override;

    // With `alone`, factors are gathered from now on and nothing is computed from them: for
    // benchmarks.
    void gather_alone(bool alone) { alone_ = alone; }
    // A line for each layer, for -v.
    std::string summary() const;

 private:
    struct Gathered {
        FactoredLayer which;
        // [ranks][passes][slot], each an activation of batch_.images, in float32 whatever the net's
        // are.
        DeviceBuffer<float> x, dy;
        std::int64_t x_slot_elems, dy_slot_elems;
        std::vector<OpIo> io;              // of each product
        std::vector<const OpIo*> io_list;  // the same
    };
    std::size_t index_of(const Bucket& bucket) const;
    void put(float* slot, std::int64_t slot_elems, const Shape& shape, int n, const Tensor& from);

    Backend& backend_;
    Net& net_;
    const int rank_, ranks_;
    const FactorBatch batch_;
    std::vector<Gathered> gathered_;
    std::vector<Batch> products_;  // the images of each
    bool alone_ = false;
};

}  // namespace gyre::train
