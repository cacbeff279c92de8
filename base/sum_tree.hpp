// The binary tree in which the terms of a sum are added, whoever has which of them: neighbours
// first, then pairs of neighbours, and so on. A term or a sum without a neighbour goes up as it is.
//
//     terms 0 1 2 3 4 5:   ((0+1) + (2+3)) + (4+5)
//
// Whoever has a range of consecutive terms can add up those whose sums are nodes of the tree; the
// rest is added when its neighbours have arrived. The result does not depend on the ranges.
#pragma once

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

namespace gyre {

// The sum of the terms [first, last).
struct TreeNode {
    int first = 0, last = 0;
    bool operator==(const TreeNode&) const = default;
};

// Returns whether the two nodes, in this order, are the children of one node of a tree over
// `terms`. A left neighbour is always complete: it has a power of two of terms.
inline bool siblings(TreeNode left, TreeNode right, int terms) {
    const int width = left.last - left.first;
    return left.last == right.first && (width & (width - 1)) == 0 &&
           left.first % (2 * width) == 0 && right.last == std::min(left.first + 2 * width, terms);
}

// Adds a node to those that precede it and wait for their neighbours, and then adds up what is
// complete. add(left, right) leaves the sum of two of the values in the left one.
template <class Value, class Add>
void push_node(std::vector<std::pair<TreeNode, Value>>& waiting, TreeNode node, Value value,
               int terms, const Add& add) {
    waiting.emplace_back(node, std::move(value));
    while (waiting.size() > 1 &&
           siblings(waiting[waiting.size() - 2].first, waiting.back().first, terms)) {
        auto& [left, sum] = waiting[waiting.size() - 2];
        add(sum, waiting.back().second);
        left.last = waiting.back().first.last;
        waiting.pop_back();
    }
}

// Adds up the terms [0, terms), one or more, in tree_slots(terms) slots: compute(term, slot), and
// add(left, right), which leaves the sum of two slots in the left one. The sum is in slot 0.
template <class Compute, class Add>
void add_in_tree(int terms, const Compute& compute, const Add& add) {
    int used = 0;
    for (int term = 0; term < terms; ++term) {
        compute(term, used++);
        const int complete = std::countr_one(static_cast<unsigned>(term));
        for (int left = term + 1 == terms ? used - 1 : complete; left > 0; --left) {
            --used;
            add(used - 1, used);
        }
    }
}
inline int tree_slots(int terms) {
    return static_cast<int>(std::bit_width(static_cast<unsigned>(terms))) + 1;
}

// Returns whether near-equal parts of the terms are a node each, so that the rest of the tree is
// the tree over the parts.
inline bool parts_are_nodes(int terms, int parts) {
    const int width = terms / parts;
    return terms % parts == 0 && (width & (width - 1)) == 0;
}

// The nodes that whoever has the terms [first, last) of all can add up, in their order.
inline std::vector<TreeNode> tree_nodes(int first, int last, int terms) {
    std::vector<std::pair<TreeNode, int>> waiting;
    for (int term = first; term < last; ++term) {
        push_node(waiting, {term, term + 1}, 0, terms, [](int, int) {});
    }
    std::vector<TreeNode> nodes;
    for (const auto& entry : waiting) {
        nodes.push_back(entry.first);
    }
    return nodes;
}

}  // namespace gyre
