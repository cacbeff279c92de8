#include "comm/term_sums.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>

namespace gyre::comm {
namespace {

void add_float(void* out, const void* left, const void* right, std::size_t elems) {
    const auto* x = static_cast<const float*>(left);
    const auto* y = static_cast<const float*>(right);
    auto* sum = static_cast<float*>(out);
    for (std::size_t i = 0; i < elems; ++i) {
        sum[i] = x[i] + y[i];
    }
}

template <DataType type>
void add_narrow(void* out, const void* left, const void* right, std::size_t elems) {
    const auto* x = static_cast<const std::uint16_t*>(left);
    const auto* y = static_cast<const std::uint16_t*>(right);
    auto* sum = static_cast<std::uint16_t*>(out);
    for (std::size_t i = 0; i < elems; ++i) {
        sum[i] = narrow::to<type>(narrow::from<type>(x[i]) + narrow::from<type>(y[i]));
    }
}

}  // namespace

TermSum term_sum_of(DataType type) {
    return type == DataType::float32    ? &add_float
           : type == DataType::bfloat16 ? &add_narrow<DataType::bfloat16>
                                        : &add_narrow<DataType::float16>;
}

void TreeSum::add_node(DataType type, int first, int last, std::size_t elems, Term term,
                       std::size_t depth, std::byte* sum) {
    const std::size_t bytes = elems * bytes_of(type);
    if (last - first == 1) {
        std::copy_n(term(first), bytes, sum);
        return;
    }
    // The left child has the greatest power of two of the terms that is less than all.
    const int middle =
        first + static_cast<int>(std::bit_floor(static_cast<unsigned>(last - first - 1)));
    const std::byte* left = term(first);
    if (middle - first > 1) {
        add_node(type, first, middle, elems, term, depth, sum);
        left = sum;
    }
    const std::byte* right = term(middle);
    if (last - middle > 1) {
        right_.resize(std::max(right_.size(), depth + 1));
        right_[depth].resize(std::max(right_[depth].size(), bytes));
        std::byte* const own = right_[depth].data();
        add_node(type, middle, last, elems, term, depth + 1, own);
        right = own;
    }
    term_sum_of(type)(sum, left, right, elems);
}

void TreeSum::add_received(DataType type, int ranks, int own_rank, std::size_t elems, void* own_row,
                           std::byte* terms) {
    const std::size_t bytes = elems * bytes_of(type);
    const auto row = [&](int rank) { return terms + static_cast<std::size_t>(rank) * bytes; };
    std::copy_n(static_cast<const std::byte*>(own_row), bytes, row(own_rank));
    add_up(type, ranks, elems, row, static_cast<std::byte*>(own_row));
}

}  // namespace gyre::comm
