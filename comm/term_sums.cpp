#include "comm/term_sums.hpp"

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

void add_terms(DataType type, int ranks, int own_rank, std::size_t elems, void* own_row,
               std::byte* terms) {
    const std::size_t bytes = elems * bytes_of(type);
    std::byte* const scratch = terms + static_cast<std::size_t>(own_rank) * bytes;
    const auto row = [&](int rank) -> const void* {
        return rank == own_rank ? own_row : terms + static_cast<std::size_t>(rank) * bytes;
    };
    const void* sum = row(0);
    for (int rank = 1; rank < ranks; ++rank) {
        // The own row is still a term until the last addition.
        void* const to = rank + 1 == ranks ? own_row : scratch;
        term_sum_of(type)(to, sum, row(rank), elems);
        sum = to;
    }
}

}  // namespace gyre::comm
