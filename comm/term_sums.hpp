// Sums of the ranks' terms, for communicators that receive terms and add them up themselves.
#pragma once

#include <cstddef>

#include "base/data_type.hpp"

namespace gyre::comm {

// out = left + right, each addition rounded to the type; out may be one of them.
using TermSum = void (*)(void* out, const void* left, const void* right, std::size_t elems);
TermSum term_sum_of(DataType type);

// The rank's own row of a reduce_scatter becomes the sum of all ranks' in their order, whoever
// adds. terms: [ranks][elems], all but the own row received; that one is scratch.
void add_terms(DataType type, int ranks, int own_rank, std::size_t elems, void* own_row,
               std::byte* terms);

}  // namespace gyre::comm
