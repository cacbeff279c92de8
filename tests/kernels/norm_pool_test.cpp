// Batch normalisation, average pooling and the sum of a residual connection on every backend,
// against double precision; and batch statistics over the ranks of a job.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <utility>
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
    void sum(float* values, std::int64_t elems) override {
        const std::size_t call = call_++;
        Floats host(static_cast<std::size_t>(elems));
        if (call == totals_.size()) {
            backend_.download(host.data(), values, host.size() * sizeof(float));
            mine_ = host;
        } else if (call < totals_.size()) {
            REQUIRE(totals_[call].size() == host.size());
            backend_.upload(values, totals_[call].data(), host.size() * sizeof(float));
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
    void sum(float*, std::int64_t) override { FAIL("other ranks were asked for a sum"); }
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

namespace {

// Calls body(output, input) for all pairs in one plane.
template <typename Body>
void for_windows(const AvgPool2dSpec& s, Body&& body) {
    const Shape out = s.out();
    for (int row = 0; row < out.height; ++row) {
        for (int col = 0; col < out.width; ++col) {
            for (int kh = 0; kh < s.kernel_height; ++kh) {
                for (int kw = 0; kw < s.kernel_width; ++kw) {
                    body(row * out.width + col,
                         (row * s.stride + kh) * s.in.width + col * s.stride + kw);
                }
            }
        }
    }
}

// Sums whose terms were multiplied by a rounded scale, before or after summation; or exact ones.
std::vector<Bounded> averages(const std::vector<BoundedSum>& sums, bool exact) {
    std::vector<Bounded> all;
    for (const BoundedSum& sum : sums) {
        all.push_back(exact ? Bounded(sum.result().value) : sum.result().rounded(2));
    }
    return all;
}

void check_average_pooling(Bench& bench, const AvgPool2dSpec& spec, int n) {
    const Shape &in = spec.in, out = spec.out();
    INFO(in.height << " x " << in.width << ", window " << spec.kernel_height << " x "
                   << spec.kernel_width << ", stride " << spec.stride << ", n = " << n);
    const int window = spec.kernel_height * spec.kernel_width;
    // Sums of small integers divided by a power of two are exact.
    const bool exact = (window & (window - 1)) == 0;
    const auto values = [&](std::int64_t elems, std::uint32_t stream) {
        Floats made = random_floats(elems, stream);
        for (float& v : made) {
            v = exact ? std::floor(8.0f * v) : v;
        }
        return made;
    };
    const Floats x = values(n * in.elems(), 51), dy = values(n * out.elems(), 52);
    std::vector<BoundedSum> y(dy.size()), dx(x.size());
    for (std::int64_t plane = 0; plane < std::int64_t{n} * in.channels; ++plane) {
        for_windows(spec, [&](int output, int input) {
            const auto to = static_cast<std::size_t>(plane * out.plane_elems() + output);
            const auto from = static_cast<std::size_t>(plane * in.plane_elems() + input);
            y[to].add(double{x[from]} / window);
            dx[from].add(double{dy[to]} / window);
        });
    }
    const Guarded dev_x = bench.activation(in, n, x), dev_dy = bench.activation(out, n, dy);
    const Guarded dev_y = bench.empty_activation(out, n), dev_dx = bench.empty_activation(in, n);
    RunOp pool(bench.backend, spec, std::max(n, 1));
    pool.batch.n = n;
    pool.forward({.x = dev_x.get(), .y = dev_y.get()});
    check_within(bench.read(out, n, dev_y), averages(y, exact));
    pool.backward({.dy = dev_dy.get(), .dx = dev_dx.get()});
    check_within(bench.read(in, n, dev_dx), averages(dx, exact));
}

}  // namespace

TEST_CASE("average pooling: windows that overlap, touch, leave gaps, or are the plane", "[gpu]") {
    on_every_backend([](Bench& bench) {
        for (const int n : kBatches) {
            for (int kernel = 1; kernel <= 4; ++kernel) {
                for (int stride = 1; stride <= kernel + 1; ++stride) {
                    check_average_pooling(bench,
                                          {.in = {3, 7, 9},
                                           .kernel_height = kernel,
                                           .kernel_width = kernel,
                                           .stride = stride},
                                          n);
                }
            }
            for (const Shape& in : {Shape{20, 1, 1}, Shape{5, 5, 7}, Shape{2, 8, 4}}) {
                check_average_pooling(
                    bench,
                    {.in = in, .kernel_height = in.height, .kernel_width = in.width, .stride = 1},
                    n);
            }
        }
    });
}

TEST_CASE("the sum of a residual connection is rounded once", "[gpu]") {
    on_every_backend([](Bench& bench) {
        for (const Shape& shape : {Shape{1, 1, 1}, Shape{3, 5, 7}, Shape{20, 14, 14}}) {
            for (const int n : kBatches) {
                Floats x = random_floats(n * shape.elems(), 61);
                const Floats x2 = random_floats(n * shape.elems(), 62);
                for (std::size_t i = 0; i < x.size(); ++i) {
                    x[i] = std::ldexp(x[i], static_cast<int>(i % 50) - 25);
                }
                if (!x.empty()) {
                    x[0] = std::numeric_limits<float>::infinity();
                }
                Floats expected = x;
                for (std::size_t i = 0; i < x.size(); ++i) {
                    expected[i] += x2[i];
                }
                const Guarded y = bench.activation(shape, n, x);
                const Guarded dev_x2 = bench.activation(shape, n, x2);
                RunOp add(bench.backend, AddSpec{.in = shape}, std::max(n, 1));
                add.batch.n = n;
                REQUIRE(add.needs().in_place);
                add.forward({.x = y.get(), .y = y.get(), .x2 = dev_x2.get()});
                CHECK(bench.read(shape, n, y) == expected);
                CHECK(bench.read(shape, n, dev_x2) == x2);
            }
        }
    });
}

TEST_CASE("channels are multiplied by their gates, of which each has the sum as its gradient",
          "[gpu]") {
    on_every_backend([](Bench& bench) {
        for (const Shape& shape : {Shape{5, 7, 9}, Shape{3, 1, 1}, Shape{2, 40, 3}}) {
            const Shape gates{shape.channels, 1, 1};
            for (const int n : {0, 1, 17, 33}) {
                INFO(shape.height << " x " << shape.width << ", n = " << n);
                const Floats gate = random_floats(n * gates.elems(), 31);
                const Floats x = random_floats(n * shape.elems(), 32);
                const Floats dy = random_floats(n * shape.elems(), 33);
                Floats y = x, dx = dy;
                Sums dgate(n * gates.elems());
                for (std::size_t i = 0; i < x.size(); ++i) {
                    const std::size_t plane = i / static_cast<std::size_t>(shape.plane_elems());
                    y[i] *= gate[plane];
                    dx[i] *= gate[plane];
                    dgate.add(static_cast<std::int64_t>(plane), double{x[i]} * double{dy[i]});
                }
                const Guarded dev_gate = bench.activation(gates, n, gate);
                const Guarded dev_x = bench.activation(shape, n, x);
                const Guarded dev_dy = bench.activation(shape, n, dy);
                const Guarded dev_y = bench.empty_activation(shape, n);
                const Guarded dev_dx = bench.empty_activation(shape, n);
                const Guarded dev_dgate = bench.empty_activation(gates, n);
                RunOp mul(bench.backend, MulSpec{gates, shape}, std::max(n, 1));
                mul.batch.n = n;
                mul.forward({.x = dev_gate.get(), .y = dev_y.get(), .x2 = dev_x.get()});
                CHECK(bench.read(shape, n, dev_y) == y);
                const OpIo io{.x = dev_gate.get(), .x2 = dev_x.get(), .dy = dev_dy.get()};
                OpIo both = io;
                both.dx = dev_dgate.get();
                both.dx2 = dev_dx.get();
                mul.backward(both);
                CHECK(bench.read(shape, n, dev_dx) == dx);
                bench.check_close(bench.read(gates, n, dev_dgate), dgate);
                const Guarded alone = bench.empty_activation(shape, n);
                const Guarded gate_alone = bench.empty_activation(gates, n);
                OpIo one = io;
                one.dx2 = alone.get();
                mul.backward(one);
                CHECK(bench.read(shape, n, alone) == dx);
                one = io;
                one.dx = gate_alone.get();
                mul.backward(one);
                CHECK(bench.read(gates, n, gate_alone) == bench.read(gates, n, dev_dgate));
            }
        }
    });
}

TEST_CASE("channels of two values are put one after the other, and their gradients taken apart",
          "[gpu]") {
    on_every_backend([](Bench& bench) {
        for (const auto& [shape, shape2] :
             {std::pair{Shape{5, 7, 9}, Shape{2, 7, 9}}, {Shape{1, 1, 1}, Shape{3, 1, 1}}}) {
            const Shape whole = ConcatSpec{shape, shape2}.out();
            for (const int n : {0, 1, 17, 33}) {
                INFO(shape.height << " x " << shape.width << ", n = " << n);
                const Floats x = random_floats(n * shape.elems(), 31);
                const Floats x2 = random_floats(n * shape2.elems(), 32);
                Floats y;
                for (std::ptrdiff_t i = 0; i < n; ++i) {
                    const auto elems = shape.elems(), elems2 = shape2.elems();
                    y.insert(y.end(), x2.begin() + i * elems2, x2.begin() + (i + 1) * elems2);
                    y.insert(y.end(), x.begin() + i * elems, x.begin() + (i + 1) * elems);
                }
                const Guarded dev_x = bench.activation(shape, n, x);
                const Guarded dev_x2 = bench.activation(shape2, n, x2);
                const Guarded dev_y = bench.empty_activation(whole, n);
                RunOp concat(bench.backend, ConcatSpec{shape, shape2}, std::max(n, 1));
                concat.batch.n = n;
                concat.forward({.x = dev_x.get(), .y = dev_y.get(), .x2 = dev_x2.get()});
                CHECK(bench.read(whole, n, dev_y) == y);
                for (const bool first : {false, true}) {
                    for (const bool second : {false, true}) {
                        const Guarded dx = bench.empty_activation(shape, n);
                        const Guarded dx2 = bench.empty_activation(shape2, n);
                        concat.backward({.dy = dev_y.get(),
                                         .dx = first ? dx.get() : nullptr,
                                         .dx2 = second ? dx2.get() : nullptr});
                        CHECK((!first || bench.read(shape, n, dx) == x));
                        CHECK((!second || bench.read(shape2, n, dx2) == x2));
                    }
                }
            }
        }
    });
}
