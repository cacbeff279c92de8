// Plans the pass kernel's program for a net and its layout in shared memory: values with the
// padding that the convolution reading them needs, weights of convolutions, dropout factors,
// positions of maxima, two gradient buffers used in turn, and finally scratch space that each step
// reuses.
#include <algorithm>
#include <variant>
#include <vector>

#include "kernels/cuda/pass_program.hpp"
#include "kernels/ops/dropout.hpp"

namespace gyre::SIMT_NAMESPACE {
namespace {

int divide_up(int a, int b) {
    return (a + b - 1) / b;
}
int round_up(int value, int step) {
    return divide_up(value, step) * step;
}
constexpr int kBanks = 32;
// A multiple of 4 but not of 8, so that 16-byte accesses of 8 threads, one pitch apart, use
// different banks.
int odd_quads(int elems) {
    const int pitch = round_up(elems, 4);
    return pitch % 8 == 0 ? pitch + 4 : pitch;
}
Divisor divisor(int by) {
    const auto d = static_cast<std::uint64_t>(by);
    return {by == 1 ? 0 : static_cast<std::uint32_t>(((std::uint64_t{1} << 32) + d - 1) / d), by};
}

class Planner {
 public:
    Planner(const TrainingPassSpec& spec, std::size_t most_shared_bytes, PassPlan& plan)
        : spec_(spec),
          most_floats_(static_cast<std::int64_t>(most_shared_bytes / sizeof(float))),
          plan_(plan),
          program_(plan.program) {}

    bool plan() {
        for (const TrainingPassSpec::Layer& layer : spec_.layers) {
            const auto* dropout = std::get_if<DropoutSpec>(&layer.spec);
            if (dropout == nullptr || dropout->probability > 0.0f) {
                layers_.push_back(&layer);
            }
        }
        if (layers_.empty() || layers_.size() > kMostPassLayers) {
            return false;
        }
        if (!place_values()) {
            return false;
        }
        program_.value_floats = static_cast<int>(floats_);
        for (std::size_t l = 0; l < layers_.size(); ++l) {
            const bool made =
                std::visit([&](const auto& s) { return make(s, l); }, layers_[l]->spec);
            if (!made || floats_ > most_floats_) {
                return false;
            }
        }
        if (program_.convs + program_.linears == 0) {
            return false;
        }
        place_gradients();
        place_scratch();
        plan_.reduce.partial_elems = program_.partial_elems;
        plan_.shared_bytes = static_cast<std::size_t>(floats_) * sizeof(float);
        return floats_ <= most_floats_;
    }

 private:
    // Allocates shared memory; each place begins at a multiple of 16 bytes.
    int place(std::int64_t elems) {
        const auto at = static_cast<int>(floats_);
        floats_ += (elems + 3) / 4 * 4;
        return at;
    }
    // The same in the scratch space that each step reuses; it is moved behind the rest at the end.
    struct Scratch {
        std::int64_t floats = 0;
        int place(std::int64_t elems) {
            const auto at = static_cast<int>(floats);
            floats += (elems + 3) / 4 * 4;
            return at;
        }
    };
    void in_scratch(const Scratch& step, std::initializer_list<int*> places) {
        scratch_floats_ = std::max(scratch_floats_, step.floats);
        in_scratch_.insert(in_scratch_.end(), places);
    }
    void place_scratch() {
        for (int* place : in_scratch_) {
            *place += static_cast<int>(floats_);
        }
        floats_ += scratch_floats_;
    }

    static Planes planes(const Shape& shape, int padding, int pitch) {
        Planes p;
        p.channels = shape.channels;
        p.height = shape.height;
        p.width = shape.width;
        p.pitch = pitch;
        p.plane = (shape.height + 2 * padding) * pitch;
        p.begin = padding * pitch + padding;
        p.elems = static_cast<int>(shape.elems());
        p.by_plane = divisor(static_cast<int>(shape.plane_elems()));
        p.by_width = divisor(shape.width);
        return p;
    }
    // The pitch of a row that a correlation reads: covers its tiles' reads and the whole row.
    static int input_pitch(int out_width, int width, int kernel) {
        return odd_quads(std::max(round_up(out_width, kTilePixels) + (kernel > 1 ? 4 : 0), width));
    }

    // Places each value in the layout that its reader needs.
    bool place_values() {
        Shape shape = spec_.input;
        for (std::size_t v = 0; v <= layers_.size(); ++v) {
            constexpr int kMostExtent = 1 << 15;  // so that a maximum's position fits in an int32
            if (shape.elems() < 1 || shape.elems() > most_floats_ ||
                std::max(shape.height, shape.width) >= kMostExtent) {
                return false;
            }
            Planes& p = program_.values[v] = planes(shape, 0, shape.width);
            if (v < layers_.size()) {
                if (const auto* conv = std::get_if<Conv2dSpec>(&layers_[v]->spec)) {
                    const Conv2dShape& of = conv->shape;
                    const int pitch =
                        input_pitch(of.out().width, shape.width + 2 * of.padding, of.kernel);
                    p = planes(shape, of.padding, pitch);
                    // Make the last row under the kernel in one channel and the first of the next
                    // one pitch apart, modulo the banks.
                    p.plane += (of.kernel * pitch - p.plane % kBanks + kBanks) % kBanks;
                }
            }
            p.begin += place(std::int64_t{p.plane} * p.channels);
            if (v < layers_.size()) {
                shape = std::visit([](const auto& s) { return s.out(); }, layers_[v]->spec);
            }
            if (floats_ > most_floats_) {
                return false;
            }
        }
        program_.layers = static_cast<int>(layers_.size());
        program_.classes = static_cast<int>(shape.elems());
        program_.quads = spec_.input.width % 4 == 0;
        return program_.classes == spec_.classes;
    }

    PassProgram::Layer& add(std::size_t l, PassKind kind, int index) {
        program_.layer[l].kind = kind;
        program_.layer[l].index = index;
        return program_.layer[l];
    }

    static Correlation correlation(int kernel, int channels, int outs, int height, int width,
                                   int x_plane, int x_pitch) {
        Correlation c;
        c.kernel = kernel;
        c.channels = channels;
        c.groups = divide_up(outs, kTileChannels);
        c.height = height;
        c.columns = divide_up(width, kTilePixels);
        c.x_plane = x_plane;
        c.x_pitch = x_pitch;
        // Enough splits that most threads have a tile.
        const int tiles = c.groups * c.height * c.columns;
        c.split_channels = divide_up(channels, std::clamp(kPassBlock / tiles, 1, channels));
        c.splits = divide_up(channels, c.split_channels);
        c.weights_pitch = odd_quads(c.groups * kTileChannels);
        c.sums_pitch = odd_quads(c.columns * kTilePixels);
        c.sums_plane = height * c.sums_pitch;
        c.items = tiles * c.splits;
        c.by_height = divisor(c.height);
        c.by_columns = divisor(c.columns);
        c.by_groups = divisor(c.groups);
        return c;
    }
    static std::int64_t sum_floats(const Correlation& c) {
        return std::int64_t{c.splits} * c.groups * kTileChannels * c.sums_plane;
    }
    static std::int64_t weight_floats(const Correlation& c) {
        return std::int64_t{c.channels} * c.kernel * c.kernel * c.weights_pitch;
    }

    bool make(const Conv2dSpec& spec, std::size_t l) {
        const Conv2dShape& s = spec.shape;
        const bool known = s.kernel == 1 || s.kernel == 3 || s.kernel == 5;
        if (s.stride != 1 || !known || s.padding >= s.kernel || program_.convs == kMostPassConvs) {
            return false;
        }
        PassConv& conv = program_.conv[program_.convs];
        add(l, PassKind::conv, program_.convs++);
        conv.weight = layers_[l]->weight_offset;
        conv.bias = layers_[l]->bias_offset;
        conv.relu = spec.relu;
        conv.biases = place(s.out_channels);
        const int taps = s.kernel * s.kernel, in = s.in.channels, outs = s.out_channels;
        const Shape out = s.out();

        const Planes& x = program_.values[l];
        conv.forward = correlation(s.kernel, in, outs, out.height, out.width, x.plane, x.pitch);
        conv.forward.x = x.begin - s.padding * x.pitch - s.padding;
        conv.forward.weights = place(weight_floats(conv.forward));
        conv.forward_weights = {in, outs, taps, taps, in * taps, false, divisor(taps), divisor(in)};
        Scratch scratch;
        conv.forward.sums = scratch.place(sum_floats(conv.forward));
        in_scratch(scratch, {&conv.forward.sums});

        make_windows(conv.windows, out, spec.pool_kernel > 0 ? spec.pool_kernel : 1,
                     spec.pool_kernel > 0 ? spec.pool_stride : 1, spec.out());
        if (spreads(spec)) {
            conv.ways.pitch = round_up(spec.out().width, kSpreadWindows);
            conv.ways.words = spec.out().channels * spec.out().height * conv.ways.pitch / 4;
            conv.ways.begin = place(conv.ways.words);
        }
        if (spec.dropout > 0.0f) {
            make_dropout(conv.dropout, spec.dropout, spec.dropout_stream, outs, 1);
        }
        make_weight_sums(conv, spec);
        conv.padding = s.padding;
        if (has_parameters_before(l)) {
            make_backward(conv, spec);
        }
        conv.partial = program_.partial_elems;
        program_.partial_elems += outs * (in * taps + 1);
        add_tensor(conv.weight, conv.partial, outs * in * taps);
        add_tensor(conv.bias, conv.partial + outs * in * taps, outs);
        return true;
    }

    // With 2 x 2 windows, each element of dx sums only a quarter of a correlation's terms.
    static bool spreads(const Conv2dSpec& spec) {
        return spec.pool_kernel == 2 && spec.pool_stride == 2;
    }
    void make_backward(PassConv& conv, const Conv2dSpec& spec) {
        spreads(spec) ? make_spread(conv, spec) : make_turned(conv, spec.shape);
    }
    void make_spread(PassConv& conv, const Conv2dSpec& spec) {
        const Shape out = spec.out();
        WindowSpread& s = conv.spread;
        s.pairs = spec.shape.in.channels * spec.shape.kernel;
        s.chunks = divide_up(s.pairs, 32);
        s.columns = divide_up(out.width, kSpreadWindows);
        Scratch scratch;
        s.sums = scratch.place(std::int64_t{out.height} * s.columns * s.pairs * kSpreadItem);
        in_scratch(scratch, {&s.sums});
    }
    void make_turned(PassConv& conv, const Conv2dShape& s) {
        const int taps = s.kernel * s.kernel, in = s.in.channels, outs = s.out_channels;
        const Shape out = s.out();
        const int padding = s.kernel - 1 - s.padding;
        Correlation& c = conv.backward;
        const int pitch = input_pitch(s.in.width, out.width + 2 * padding, s.kernel);
        c = correlation(s.kernel, outs, in, s.in.height, s.in.width,
                        (out.height + 2 * padding) * pitch, pitch);
        conv.backward_weights = {outs, in,   taps,          in * taps,
                                 taps, true, divisor(taps), divisor(outs)};
        conv.dy = spread_planes(outs, c.x_plane, c.x_pitch, padding);
        Scratch scratch;
        conv.dy.begin = c.x = scratch.place(conv.dy.elems);
        c.weights = scratch.place(weight_floats(c));
        c.sums = scratch.place(sum_floats(c));
        in_scratch(scratch, {&conv.dy.begin, &c.x, &c.weights, &c.sums});
    }

    static SpreadPlanes spread_planes(int channels, int plane, int pitch, int padding) {
        SpreadPlanes p;
        p.plane = plane;
        p.pitch = pitch;
        p.padding = padding;
        p.elems = channels * plane;
        p.by_plane = divisor(plane);
        p.by_pitch = divisor(pitch);
        return p;
    }
    void make_weight_sums(PassConv& conv, const Conv2dSpec& spec) {
        const Shape source = spec.shape.out();
        const int kernel = spec.shape.kernel;
        WeightSums& w = conv.weights;
        w.outs = spec.shape.out_channels;
        w.pairs = spec.shape.in.channels * kernel;
        w.taps = w.pairs * kernel;
        const int groups = divide_up(w.outs, kWeightOuts);
        w.height = source.height;
        const int tiles = groups * w.pairs;
        const int splits = std::clamp(kPassBlock / tiles, 1, w.height);
        w.split_rows = divide_up(w.height, splits);
        w.splits = divide_up(w.height, w.split_rows);
        w.items = tiles * w.splits;
        w.by_splits = divisor(w.splits);
        w.by_pairs = divisor(w.pairs);
        Scratch scratch;
        w.columns = divide_up(source.width, kTilePixels);
        const int pitch = odd_quads(w.columns * kTilePixels);
        w.dy = spread_planes(w.outs, source.height * pitch, pitch, 0);
        w.dy.begin = scratch.place(w.dy.elems);
        // Odd, so that the sums of neighbouring splits are in different banks.
        w.sums_pitch = w.outs * (w.taps + 1) | 1;
        w.sums = scratch.place(std::int64_t{w.splits} * w.sums_pitch);
        in_scratch(scratch, {&w.dy.begin, &w.sums});
    }

    void make_windows(Windows& windows, const Shape& source, int kernel, int stride,
                      const Shape& out) {
        windows.height = source.height;
        windows.width = source.width;
        windows.kernel = kernel;
        windows.stride = stride;
        windows.by_stride = divisor(stride);
        windows.where = place(out.elems());
    }
    void make_dropout(PassDropout& dropout, float probability, std::uint32_t stream, int words,
                      int word_elems) {
        dropout.words = words;
        dropout.stream = stream;
        dropout.largest_dropped = largest_dropped_word(probability);
        dropout.keep = kept_factor(probability);
        dropout.by_word = divisor(word_elems);
        dropout.factors = place(words);
    }

    bool make(const LinearSpec& spec, std::size_t l) {
        if (program_.linears == kMostPassLinears) {
            return false;
        }
        PassLinear& linear = program_.linear[program_.linears];
        add(l, PassKind::linear, program_.linears++);
        linear.weight = layers_[l]->weight_offset;
        linear.bias = layers_[l]->bias_offset;
        linear.in = spec.shape.in_features;
        linear.out = spec.shape.out_features;
        linear.relu = spec.relu;
        const int quads = linear.in % 4 == 0 ? linear.in / 4 : linear.in;
        linear.split_outs = divide_up(linear.out, std::clamp(kPassBlock / quads, 1, linear.out));
        linear.splits = divide_up(linear.out, linear.split_outs);
        linear.by_quads = divisor(quads);
        linear.biases = place(linear.out);
        if (spec.shape.weight_elems() <= kMostKeptWeights) {
            linear.kept = place(spec.shape.weight_elems());
        }
        Scratch scratch;
        linear.sums = scratch.place(std::int64_t{linear.splits} * linear.in);
        in_scratch(scratch, {&linear.sums});
        linear.x_factor = plan_.factor_elems;
        linear.dy_factor = linear.x_factor + std::int64_t{spec_.images} * linear.in;
        plan_.factor_elems = linear.dy_factor + std::int64_t{spec_.images} * linear.out;
        // The gradient's columns are the inputs and the bias.
        const int columns = divide_up(linear.in + 1, kReduceColumns);
        plan_.reduce.linear[plan_.reduce.linears++] = {
            linear.weight, linear.bias, linear.x_factor, linear.dy_factor,
            linear.in,     linear.out,  columns,         0};
        return true;
    }
    bool make(const MaxPool2dSpec& spec, std::size_t l) {
        if (pools_ == kMostPassPools || spec.shape.clips()) {
            return false;
        }
        add(l, PassKind::maxpool, pools_);
        make_windows(program_.maxpool[pools_++], spec.shape.in, spec.shape.kernel,
                     spec.shape.stride, spec.out());
        return true;
    }
    bool make(const ReluSpec&, std::size_t l) {
        add(l, PassKind::relu, 0);
        return true;
    }
    bool make(const DropoutSpec& spec, std::size_t l) {
        if (dropouts_ == kMostPassDropouts) {
            return false;
        }
        add(l, PassKind::dropout, dropouts_);
        make_dropout(program_.dropout[dropouts_++], spec.probability, spec.stream,
                     static_cast<int>(spec.by_channel ? spec.in.channels : spec.in.elems()),
                     static_cast<int>(spec.by_channel ? spec.in.plane_elems() : 1));
        return true;
    }
    template <typename Other>
    bool make(const Other&, std::size_t) {
        return false;
    }

    bool has_parameters_before(std::size_t l) const {
        return std::any_of(layers_.begin(), layers_.begin() + static_cast<std::ptrdiff_t>(l),
                           [](const auto* layer) { return layer->weight_offset >= 0; });
    }
    // A layer's dy and dx alternate between two buffers.
    void place_gradients() {
        std::size_t first = 0;
        while (layers_[first]->weight_offset < 0) {
            ++first;
        }
        program_.first = static_cast<int>(first);
        int most = 0;
        for (std::size_t v = first + 1; v <= layers_.size(); ++v) {
            most = std::max(most, program_.values[v].elems);
        }
        int dy = place(most), dx = place(most);
        for (std::size_t l = layers_.size(); l-- > first;) {
            program_.layer[l].dy = dy;
            program_.layer[l].dx = l > first ? dx : -1;
            std::swap(dy, dx);
        }
    }
    void add_tensor(std::int64_t to, int partial, int elems) {
        ReduceProgram& reduce = plan_.reduce;
        reduce.tensor[reduce.tensors++] = {to, partial, elems, 0};
    }

    const TrainingPassSpec& spec_;
    const std::int64_t most_floats_;
    PassPlan& plan_;
    PassProgram& program_;
    std::vector<const TrainingPassSpec::Layer*> layers_;
    std::int64_t floats_ = 0, scratch_floats_ = 0;
    std::vector<int*> in_scratch_;
    int pools_ = 0, dropouts_ = 0;
};

// Numbers the blocks: tensors of convolutions first, then linear layers.
void number_blocks(ReduceProgram& reduce) {
    int blocks = 0;
    for (int t = 0; t < reduce.tensors; ++t) {
        blocks += divide_up(reduce.tensor[t].elems, kReduceElems);
        reduce.tensor[t].last_block = blocks;
    }
    for (int l = 0; l < reduce.linears; ++l) {
        ReduceProgram::Linear& linear = reduce.linear[l];
        blocks += linear.column_tiles * divide_up(linear.out, kReduceRows);
        linear.last_block = blocks;
    }
    reduce.blocks = blocks + 1;  // the last one computes the sums
}

}  // namespace

bool plan_pass(const TrainingPassSpec& spec, std::size_t most_shared_bytes, PassPlan& plan) {
    if (!Planner(spec, most_shared_bytes, plan).plan()) {
        return false;
    }
    number_blocks(plan.reduce);
    return true;
}

}  // namespace gyre::SIMT_NAMESPACE
