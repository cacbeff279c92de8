// Batch and group normalisation on every backend, against double precision; and batch statistics
// over the ranks of a job.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <vector>

#include "tests/kernels/run_op.hpp"
#include "tests/support/backends.hpp"
#include "tests/support/bounded.hpp"
#include "tests/support/catch.hpp"

using namespace gyre;
using namespace gyre::test;

namespace {

const int kBatches[] = {0, 1, 2, 17, 33};

// The number of images that memory for n has room for: on the CPU, whole blocks. At least one.
int room(const Bench& bench, const Shape& shape, int n) {
    int images = std::max(n, 1);
    const std::int64_t elems = bench.backend.activation_elems(shape, images);
    while (bench.backend.activation_elems(shape, images + 1) == elems) {
        ++images;
    }
    return images;
}
// n images, followed by huge numbers in the unused room.
Guarded padded(Bench& bench, const Shape& shape, int n, Floats values) {
    const int images = room(bench, shape, n);
    values.resize(static_cast<std::size_t>(images * shape.elems()), 1e30f);
    return bench.activation(shape, images, values);
}
Guarded place_for(Bench& bench, const Shape& shape, int n) {
    return bench.empty_activation(shape, room(bench, shape, n));
}
// Returns the n images; checks that the unused room is zero.
Floats read_images(Bench& bench, const Shape& shape, int n, const Guarded& device) {
    if (n == 0) {
        return {};
    }
    const auto elems = static_cast<std::ptrdiff_t>(n * shape.elems());
    const Floats all = bench.read(shape, room(bench, shape, n), device);
    CHECK(std::all_of(all.begin() + elems, all.end(), [](float v) { return v == 0.0f; }));
    return {all.begin(), all.begin() + elems};
}

// A batch normalisation with all its inputs, on all ranks.
struct Problem {
    BatchNorm2dSpec spec;
    int n = 0;
    Floats x, dy, weight, bias, mean, variance;

    Problem(const BatchNorm2dSpec& spec_, int n_, float offset) : spec(spec_), n(n_) {
        const std::int64_t elems = n * spec.in.elems(), channels = spec.in.channels;
        const auto values = [](std::int64_t count, std::uint32_t stream, float shift, float scale) {
            Floats made = random_floats(count, stream);
            for (float& v : made) {
                v = shift + scale * v;
            }
            return made;
        };
        x = values(elems, 41, offset, std::sqrt(3.0f));  // standard deviation 1
        dy = values(elems, 42, 0.25f, 1.0f);
        weight = values(channels, 43, 0.5f, 1.0f);
        bias = values(channels, 44, 0.0f, 1.0f);
        mean = values(channels, 45, offset, 1.0f);
        variance = values(channels, 46, 1.5f, 1.0f);
    }
    // Calls body(index) for the elements of channel c in images [from, to).
    template <typename Body>
    void for_channel(int c, int from, int to, Body&& body) const {
        const std::int64_t plane = spec.in.plane_elems();
        for (int image = from; image < to; ++image) {
            const std::int64_t begin = (std::int64_t{image} * spec.in.channels + c) * plane;
            for (std::int64_t i = begin; i < begin + plane; ++i) {
                body(static_cast<std::size_t>(i));
            }
        }
    }
    std::vector<Bounded> channel(const Floats& values, int c, int from, int to) const {
        std::vector<Bounded> of_channel;
        for_channel(c, from, to, [&](std::size_t i) { of_channel.push_back(double{values[i]}); });
        return of_channel;
    }
    // A sum goes through float32 over a plane of an image. The six further roundings are a block's,
    // a rank's and three ranks' sums, and the final one.
    int roundings() const { return static_cast<int>(spec.in.plane_elems()) + 6; }
};

// Results for images [from, to) with the statistics of all.
struct Expected {
    std::vector<Bounded> y, dx, evaluated, dweight, dbias, mean, variance;
};

// A running statistic after a batch's. Our kernels compute from + momentum (to - from), cuDNN
// (1 - momentum) from + momentum to.
Bounded moved(const Bench& bench, const Bounded& from, const Bounded& to, double momentum) {
    Bounded after = from + momentum * (to - from);
    if (bench.normwise) {
        const Bounded theirs = Bounded(1.0 - momentum).rounded() * from + momentum * to;
        after.error = std::max(after.error, theirs.error);
    }
    return after;
}

Expected expect(const Bench& bench, const Problem& on, int from, int to) {
    const auto n_elems = static_cast<std::size_t>((to - from) * on.spec.in.elems());
    const auto first = static_cast<std::size_t>(from * on.spec.in.elems());
    Expected e;
    e.y.resize(n_elems);
    e.dx.resize(n_elems);
    e.evaluated.resize(n_elems);
    const auto count = static_cast<double>(on.n * on.spec.in.plane_elems());
    for (int c = 0; c < on.spec.in.channels; ++c) {
        const auto at_c = static_cast<std::size_t>(c);
        const double weight = on.weight[at_c], bias = on.bias[at_c];
        const Bounded running_mean = double{on.mean[at_c]},
                      running_variance = double{on.variance[at_c]};
        if (on.n == 0) {
            e.dweight.push_back(0.0);
            e.dbias.push_back(0.0);
            e.mean.push_back(running_mean);
            e.variance.push_back(running_variance);
            continue;
        }
        const std::vector<Bounded> x = on.channel(on.x, c, 0, on.n);
        const auto s = NormChannel::measured(x, on.roundings(), on.spec.epsilon);
        const auto running =
            NormChannel::running(on.mean[at_c], on.variance[at_c], on.spec.epsilon);
        e.mean.push_back(moved(bench, running_mean, s.mean, double{on.spec.momentum}));
        e.variance.push_back(
            // cuDNN rounds the factor that makes a variance unbiased by itself.
            moved(bench, running_variance, bench.normwise ? s.unbiased.rounded() : s.unbiased,
                  double{on.spec.momentum}));
        const auto mine =
            s.gradients(on.channel(on.x, c, from, to), on.channel(on.dy, c, from, to));
        e.dweight.push_back(mine.weight);
        e.dbias.push_back(mine.bias);
        const auto all = s.gradients(x, on.channel(on.dy, c, 0, on.n));
        on.for_channel(c, from, to, [&](std::size_t i) {
            e.y[i - first] = s.y(double{on.x[i]}, weight, bias);
            e.evaluated[i - first] = running.y(double{on.x[i]}, weight, bias);
            e.dx[i - first] = s.dx(double{on.x[i]}, double{on.dy[i]}, weight, all, count);
        });
    }
    return e;
}

// One rank's operation on images [from, to), with its tensors.
class Rank {
 public:
    Rank(Bench& bench, const Problem& all, int from, int to)
        : n_(to - from),
          bench_(bench),
          all_(all),
          op_(bench.backend, all.spec, std::max(n_, 1)),
          x_(images(all.x, from, to)),
          dy_(images(all.dy, from, to)),
          y_(place_for(bench, all.spec.in, n_)),
          dx_(place_for(bench, all.spec.in, n_)),
          weight_(bench.vector(all.weight)),
          bias_(bench.vector(all.bias)),
          dweight_(bench.empty(all.spec.in.channels)),
          dbias_(bench.empty(all.spec.in.channels)),
          mean_(bench.vector(all.mean)),
          variance_(bench.vector(all.variance)) {
        op_.batch.n = n_;
    }
    void of_job(RankSums& ranks) {
        op_.batch.global_n = all_.n;
        op_.batch.ranks = &ranks;
    }
    // Starts from the initial running statistics.
    void forward(bool training) {
        bench_.backend.upload(mean_.get(), all_.mean.data(), all_.mean.size() * sizeof(float));
        bench_.backend.upload(variance_.get(), all_.variance.data(),
                              all_.variance.size() * sizeof(float));
        op_.batch.training = training;
        op_.forward(io());
    }
    void backward() { op_.backward(io()); }

    Floats read(const Guarded& images) const {
        return read_images(bench_, all_.spec.in, n_, images);
    }
    Floats y() const { return read(y_); }
    Floats dx() const { return read(dx_); }
    Floats mean() const { return mean_.download(); }
    Floats variance() const { return variance_.download(); }
    Floats dweight() const { return dweight_.download(); }
    Floats dbias() const { return dbias_.download(); }
    // Call after a training pass.
    void check(const Expected& expected) const {
        check_within(y(), expected.y);
        check_within(mean(), expected.mean);
        check_within(variance(), expected.variance);
        check_within(dx(), expected.dx);
        check_within(dweight(), expected.dweight);
        check_within(dbias(), expected.dbias);
    }

 private:
    Guarded images(const Floats& all, int from, int to) {
        const std::int64_t elems = all_.spec.in.elems();
        return padded(bench_, all_.spec.in, to - from,
                      {all.begin() + from * elems, all.begin() + to * elems});
    }
    OpIo io() const {
        return {.x = x_.get(),
                .y = y_.get(),
                .dy = dy_.get(),
                .dx = dx_.get(),
                .params = {weight_.get(), bias_.get()},
                .grads = {dweight_.get(), dbias_.get()},
                .state = {mean_.get(), variance_.get()}};
    }

    const int n_;
    Bench& bench_;
    const Problem& all_;
    RunOp op_;
    Guarded x_, dy_, y_, dx_, weight_, bias_, dweight_, dbias_, mean_, variance_;
};

// Ranks that run one after another, repeatedly: each round determines one more sum. The sums before
// it have their final values, and those after it are not used.
class Rounds final : public RankSums {
 public:
    Rounds(Backend& backend, int ranks) : backend_(backend), ranks_(ranks) {}

    // Calls pass(rank) as often as needed to determine its `sums` sums, then once more with all.
    void run(int sums, const std::function<void(int)>& pass) {
        totals_.clear();
        for (int round = 0; round <= sums; ++round) {
            Floats total;
            for (int rank = 0; rank < ranks_; ++rank) {
                call_ = 0;
                pass(rank);
                REQUIRE(call_ == static_cast<std::size_t>(sums));
                total.resize(mine_.size());
                std::transform(mine_.begin(), mine_.end(), total.begin(), total.begin(),
                               [](float a, float b) { return a + b; });
            }
            totals_.push_back(total);
        }
    }
    void sum(const LeafValues& values) override {
        const std::size_t call = call_++;
        Floats host(static_cast<std::size_t>(values.elems));
        if (call == totals_.size()) {
            backend_.download(host.data(), values.data, host.size() * sizeof(float));
            mine_ = host;
        } else if (call < totals_.size()) {
            REQUIRE(totals_[call].size() == host.size());
            backend_.upload(values.data, totals_[call].data(), host.size() * sizeof(float));
        }
    }

 private:
    Backend& backend_;
    const int ranks_;
    std::vector<Floats> totals_;
    Floats mine_;  // this round's sum, of the rank that ran last
    std::size_t call_ = 0;
};

struct Unused final : RankSums {
    void sum(const LeafValues&) override { FAIL("other ranks were asked for a sum"); }
};

}  // namespace

TEST_CASE("batch normalisation: a batch's and running statistics, and the gradients", "[gpu]") {
    on_every_backend([](Bench& bench) {
        struct Plane {
            int height, width, every;  // every: step between channel counts
        };
        for (const Plane& plane : {Plane{1, 1, 1}, Plane{5, 7, 3}, Plane{14, 14, 7}}) {
            for (int channels = 20; channels >= 1; channels -= plane.every) {
                for (const int n : kBatches) {
                    const float offset = (channels + n) % 2 == 0 ? 100.0f : 0.0f;
                    const Problem problem({.in = {channels, plane.height, plane.width}}, n, offset);
                    INFO(channels << " x " << plane.height << " x " << plane.width << ", n = " << n
                                  << ", mean " << offset);
                    const Expected expected = expect(bench, problem, 0, n);
                    Rank rank(bench, problem, 0, n);
                    rank.forward(false);
                    check_within(rank.y(), expected.evaluated);
                    CHECK(rank.mean() == problem.mean);
                    CHECK(rank.variance() == problem.variance);
                    rank.forward(true);
                    rank.backward();
                    rank.check(expected);
                }
            }
        }
    });
}

TEST_CASE("batch normalisation: the statistics are those of all ranks' images", "[gpu]") {
    on_every_backend([](Bench& bench) {
        for (const std::vector<int>& shares :
             {std::vector{1, 1}, {3, 2}, {0, 5}, {17, 16}, {2, 0, 4}}) {
            for (const float offset : {0.0f, 100.0f}) {
                int n = 0;
                for (const int share : shares) {
                    n += share;
                }
                INFO(n << " images, of rank 0 " << shares[0] << ", mean " << offset);
                const Problem problem({.in = {5, 5, 7}}, n, offset);
                Rounds rounds(bench.backend, static_cast<int>(shares.size()));
                std::vector<std::unique_ptr<Rank>> ranks;
                std::vector<Expected> expected;
                int from = 0;
                for (const int share : shares) {
                    expected.push_back(expect(bench, problem, from, from + share));
                    ranks.push_back(std::make_unique<Rank>(bench, problem, from, from + share));
                    ranks.back()->of_job(rounds);
                    from += share;
                }
                const auto rank = [&](int i) -> Rank& {
                    return *ranks[static_cast<std::size_t>(i)];
                };
                rounds.run(0, [&](int i) {
                    rank(i).forward(false);
                    check_within(rank(i).y(), expected[static_cast<std::size_t>(i)].evaluated);
                });
                rounds.run(2, [&](int i) { rank(i).forward(true); });
                rounds.run(1, [&](int i) { rank(i).backward(); });
                for (std::size_t i = 0; i < ranks.size(); ++i) {
                    INFO("rank " << i);
                    ranks[i]->check(expected[i]);
                    // Running statistics stay the same on all ranks.
                    CHECK(ranks[i]->mean() == ranks[0]->mean());
                    CHECK(ranks[i]->variance() == ranks[0]->variance());
                }
            }
        }
    });
}

TEST_CASE("batch normalisation: local statistics do not involve other ranks", "[gpu]") {
    on_every_backend([](Bench& bench) {
        const Problem all({.in = {3, 5, 7}, .local = true}, 9, 1.0f);
        Problem share(all.spec, 4, 1.0f);
        std::copy_n(all.x.begin(), share.x.size(), share.x.begin());
        std::copy_n(all.dy.begin(), share.dy.size(), share.dy.begin());
        Unused unused;
        Rank rank(bench, all, 0, 4);
        rank.of_job(unused);
        rank.forward(true);
        rank.backward();
        rank.check(expect(bench, share, 0, 4));
        Rank idle(bench, all, 4, 4);
        idle.of_job(unused);
        idle.forward(true);
        idle.backward();
        CHECK(idle.mean() == all.mean);
        CHECK(idle.variance() == all.variance);
        CHECK(idle.dweight() == Floats(3, 0.0f));
        CHECK(idle.dbias() == Floats(3, 0.0f));
    });
}

// x is far from zero in some groups; weights and biases differ by channel.
TEST_CASE("group normalisation: statistics of an image's groups, and the gradients", "[gpu]") {
    on_every_backend([](Bench& bench) {
        for (const GroupNormSpec& spec :
             {GroupNormSpec{{6, 5, 7}, 3}, GroupNormSpec{{6, 5, 7}, 1, 1e-3f},
              GroupNormSpec{{4, 3, 3}, 4}, GroupNormSpec{{19, 1, 1}, 1},
              GroupNormSpec{{20, 1, 1}, 5}, GroupNormSpec{{2, 14, 19}, 1},
              GroupNormSpec{{3, 1, 1}, 3}}) {
            const Shape& shape = spec.in;
            const std::int64_t plane = shape.plane_elems(), channels = shape.channels;
            const auto group = static_cast<std::size_t>(spec.group_elems());
            // As a batch normalisation's, and one more rounding of dy * weight.
            const int roundings = static_cast<int>(plane) + 6;
            for (const int n : kBatches) {
                INFO(channels << " x " << shape.height << " x " << shape.width << " in "
                              << spec.groups << " groups, n = " << n);
                Floats x = random_floats(n * shape.elems(), 71);
                for (std::size_t i = 0; i < x.size(); ++i) {
                    x[i] += i / group % 3 == 2 ? 50.0f : 0.0f;
                }
                const Floats dy = random_floats(n * shape.elems(), 72);
                const Floats weight = random_floats(channels, 73),
                             bias = random_floats(channels, 74);
                std::vector<Bounded> y, dx;
                std::vector<BoundedSum> dweight(weight.size()), dbias(weight.size());
                for (std::size_t first = 0; first < x.size(); first += group) {
                    const auto channel = [&](std::size_t i) {
                        return i / static_cast<std::size_t>(plane) % weight.size();
                    };
                    std::vector<Bounded> values, gradients;
                    for (std::size_t i = first; i < first + group; ++i) {
                        values.push_back(double{x[i]});
                        gradients.push_back(
                            (Bounded(double{dy[i]}) * double{weight[channel(i)]}).rounded());
                    }
                    const NormChannel s = NormChannel::measured(values, roundings, spec.epsilon);
                    const auto sums = s.gradients(values, gradients);
                    const auto count = static_cast<double>(group);
                    for (std::size_t i = first; i < first + group; ++i) {
                        const std::size_t c = channel(i);
                        y.push_back(s.y(double{x[i]}, double{weight[c]}, double{bias[c]}));
                        dx.push_back(s.dx(double{x[i]}, gradients[i - first], 1.0, sums, count));
                        dweight[c].add(Bounded(double{dy[i]}) * (Bounded(double{x[i]}) - s.mean) *
                                       s.inverse);
                        dbias[c].add(double{dy[i]});
                    }
                }
                const Guarded dev_x = padded(bench, shape, n, x),
                              dev_dy = padded(bench, shape, n, dy);
                const Guarded dev_y = place_for(bench, shape, n),
                              dev_dx = place_for(bench, shape, n);
                const Guarded dev_weight = bench.vector(weight), dev_bias = bench.vector(bias);
                const Guarded dev_dweight = bench.empty(channels),
                              dev_dbias = bench.empty(channels);
                RunOp op(bench.backend, spec, std::max(n, 1));
                op.batch.n = n;
                const OpIo io{.x = dev_x.get(),
                              .y = dev_y.get(),
                              .dy = dev_dy.get(),
                              .dx = dev_dx.get(),
                              .params = {dev_weight.get(), dev_bias.get()},
                              .grads = {dev_dweight.get(), dev_dbias.get()}};
                op.batch.training = false;
                op.forward(io);
                const Floats evaluated = read_images(bench, shape, n, dev_y);
                check_within(evaluated, y);
                op.batch.training = true;
                op.forward(io);
                CHECK(read_images(bench, shape, n, dev_y) == evaluated);
                op.backward(io);
                check_within(read_images(bench, shape, n, dev_dx), dx);
                std::vector<Bounded> of_weight, of_bias;
                for (std::size_t c = 0; c < weight.size(); ++c) {
                    of_weight.push_back(dweight[c].result(roundings));
                    of_bias.push_back(dbias[c].result(roundings));
                }
                check_within(dev_dweight.download(), of_weight);
                check_within(dev_dbias.download(), of_bias);
            }
        }
    });
}
