#include "comm/term_sums.hpp"

#include <algorithm>
#include <cstdint>

#include "base/sum_tree.hpp"

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

void TreeSum::add_up(DataType type, int ranks, std::size_t elems, Term term, std::byte* sum) {
    const std::size_t bytes = elems * bytes_of(type);
    slots_.resize(static_cast<std::size_t>(tree_slots(ranks)));
    const auto slot = [&](int i) -> Slot& { return slots_[static_cast<std::size_t>(i)]; };
    add_in_tree(
        ranks, [&](int rank, int i) { slot(i).value = term(rank); },
        [&](int left, int right) {
            std::vector<std::byte>& memory = slot(left).memory;
            if (left > 0) {
                memory.resize(std::max(memory.size(), bytes));
            }
            std::byte* const to = left == 0 ? sum : memory.data();
            term_sum_of(type)(to, slot(left).value, slot(right).value, elems);
            slot(left).value = to;
        });
    if (ranks == 1) {
        std::copy_n(term(0), bytes, sum);
    }
}

void TreeSum::add_received(DataType type, int ranks, int own_rank, std::size_t elems, void* own_row,
                           std::byte* terms) {
    const std::size_t bytes = elems * bytes_of(type);
    const auto row = [&](int rank) { return terms + static_cast<std::size_t>(rank) * bytes; };
    std::copy_n(static_cast<const std::byte*>(own_row), bytes, row(own_rank));
    add_up(type, ranks, elems, row, static_cast<std::byte*>(own_row));
}

}  // namespace gyre::comm
