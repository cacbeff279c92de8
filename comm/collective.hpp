// A collective operation as a value. A new kind needs an enumerator here, a case in each
// communicator's start() (the compiler names them) and a test in tests/comm/comm_test.cpp.
#pragma once

#include <cstdint>
#include <string>

#include "base/data_type.hpp"

namespace gyre::comm {

// The part of a step that an operation belongs to, for reports.
struct Origin {
    std::int64_t step = -1;  // of the training, from 0; -1: none
    const char* part = "";   // of the step, such as "bucket"
    int index = -1;          // among such parts, from 0
};

struct Collective {
    enum class Kind {
        all_reduce,  // data: [count]; the sum over the ranks, each addition rounded to the type
        all_gather,  // data: [size][count], of which each rank has written its own row: all rows
        // data: [size][count]; each rank's own row becomes the sum of that row over the ranks, each
        // addition rounded to the type. The other rows stay as they are.
        reduce_scatter,
    };
    Kind kind;
    void* data;          // input and output
    std::int64_t count;  // elements that each rank contributes; of reduce_scatter: that it gets
    DataType type = DataType::float32;
    Origin origin = {};
    // Of all_reduce: the additions are those of the tree over the ranks (base/sum_tree.hpp), if
    // Communicator::can_sum_in_tree(). Those of reduce_scatter then are in any case.
    bool in_tree = false;
};

constexpr const char* name_of(Collective::Kind kind) {
    switch (kind) {
        case Collective::Kind::all_reduce:
            return "allreduce";
        case Collective::Kind::all_gather:
            return "allgather";
        case Collective::Kind::reduce_scatter:
            return "reducescatter";
    }
    return "";
}
// Bytes of one rank's contribution, or of its share of a sum.
constexpr std::int64_t bytes_of(const Collective& collective) {
    return collective.count * static_cast<std::int64_t>(bytes_of(collective.type));
}

// A part of a collective's data, counted in bytes.
struct ByteRange {
    std::int64_t begin_bytes, bytes;
};
// All of the data, the part that a rank contributes, and the part that is its result.
constexpr ByteRange all_of(const Collective& c, int ranks) {
    return {0, bytes_of(c) * (c.kind == Collective::Kind::all_reduce ? 1 : ranks)};
}
constexpr ByteRange sent_by(int rank, const Collective& c, int ranks) {
    return c.kind == Collective::Kind::all_gather ? ByteRange{rank * bytes_of(c), bytes_of(c)}
                                                  : all_of(c, ranks);
}
constexpr ByteRange received_by(int rank, const Collective& c, int ranks) {
    return c.kind == Collective::Kind::reduce_scatter ? ByteRange{rank * bytes_of(c), bytes_of(c)}
                                                      : all_of(c, ranks);
}

// The description of an operation in reports.
struct Label {
    std::string name;        // such as allreduce(fp32)
    std::int64_t bytes = 0;  // as bytes_of()
    Origin origin = {};
};
inline Label label_of(const Collective& c) {
    return {std::string(name_of(c.kind)) + "(" + name_of(c.type) + ")", bytes_of(c), c.origin};
}

}  // namespace gyre::comm
