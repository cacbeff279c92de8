// Sums of the ranks' terms, for communicators that receive terms and add them up themselves.
#pragma once

#include <cstddef>
#include <vector>

#include "base/data_type.hpp"
#include "base/function_ref.hpp"

namespace gyre::comm {

// out = left + right, each addition rounded to the type; out may be one of them.
using TermSum = void (*)(void* out, const void* left, const void* right, std::size_t elems);
TermSum term_sum_of(DataType type);

// Adds up terms of ranks in the tree over them (base/sum_tree.hpp). The memory that this takes is
// kept for the next sum.
class TreeSum {
 public:
    using Term = FunctionRef<const std::byte*(int rank)>;
    // sum [elems] = that of the terms of the ranks [0, ranks), none of which it may be.
    void add_up(DataType type, int ranks, std::size_t elems, Term term, std::byte* sum);
    // own_row [elems], which is this rank's term, becomes the sum. terms: [ranks][elems], all but
    // the own one received.
    void add_received(DataType type, int ranks, int own_rank, std::size_t elems, void* own_row,
                      std::byte* terms);

 private:
    struct Slot {
        const std::byte* value = nullptr;  // a term, or a sum in `memory` or, of slot 0, the result
        std::vector<std::byte> memory = {};
    };
    std::vector<Slot> slots_;
};

}  // namespace gyre::comm
