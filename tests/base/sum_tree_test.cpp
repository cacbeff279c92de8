// The tree of sums: its shape against its definition, and that it does not depend on who has what.
#include "base/sum_tree.hpp"

#include <string>

#include "tests/support/catch.hpp"

using namespace gyre;

namespace {

using Waiting = std::vector<std::pair<TreeNode, std::string>>;

// As text, by definition: the left child of a node has the greatest power of two of its terms.
std::string by_definition(int first, int last) {
    if (last - first == 1) {
        return std::to_string(first);
    }
    int width = 1;
    while (2 * width < last - first) {
        width *= 2;
    }
    return "(" + by_definition(first, first + width) + "+" + by_definition(first + width, last) +
           ")";
}

void add(std::string& left, const std::string& right) {
    left = "(" + left + "+" + right + ")";
}

// Each owner, who has the terms up to the next bound, adds up what it can; then all nodes are
// added.
std::string summed_by(const std::vector<int>& bounds) {
    const int terms = bounds.back();
    Waiting all;
    for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
        Waiting own;
        for (int term = bounds[i]; term < bounds[i + 1]; ++term) {
            push_node(own, {term, term + 1}, std::to_string(term), terms, add);
        }
        const std::vector<TreeNode> nodes = tree_nodes(bounds[i], bounds[i + 1], terms);
        REQUIRE(own.size() == nodes.size());
        for (std::size_t n = 0; n < nodes.size(); ++n) {
            CHECK(own[n].first == nodes[n]);
            push_node(all, own[n].first, own[n].second, terms, add);
        }
    }
    REQUIRE(all.size() == 1);
    CHECK(all[0].first == TreeNode{0, terms});
    return all[0].second;
}

}  // namespace

TEST_CASE("a sum over a tree does not depend on who has which terms", "[sum_tree]") {
    for (int terms = 1; terms <= 33; ++terms) {
        const std::string expected = by_definition(0, terms);
        INFO(terms << " terms: " << expected);
        std::vector<std::string> slots(static_cast<std::size_t>(tree_slots(terms)));
        add_in_tree(
            terms,
            [&](int term, int slot) {
                slots.at(static_cast<std::size_t>(slot)) = std::to_string(term);
            },
            [&](int left, int right) {
                add(slots.at(static_cast<std::size_t>(left)),
                    slots.at(static_cast<std::size_t>(right)));
            });
        CHECK(slots.front() == expected);
        for (int owners = 1; owners <= terms; ++owners) {
            std::vector<int> bounds{0};
            for (int owner = 1; owner <= owners; ++owner) {
                bounds.push_back(terms * owner / owners);
            }
            CHECK(summed_by(bounds) == expected);
        }
        for (int cut = 1; cut < terms; ++cut) {  // the most uneven ones too
            CHECK(summed_by({0, cut, terms}) == expected);
        }
    }
    CHECK(by_definition(0, 6) == "(((0+1)+(2+3))+(4+5))");
}

TEST_CASE("equal shares of a power of two are one node each", "[sum_tree]") {
    for (int ranks = 1; ranks <= 16; ranks *= 2) {
        for (int rank = 0; rank < ranks; ++rank) {
            const int own = 16 / ranks;
            CHECK(tree_nodes(rank * own, (rank + 1) * own, 16) ==
                  std::vector{TreeNode{rank * own, (rank + 1) * own}});
        }
    }
    CHECK(tree_nodes(3, 6, 8) == std::vector<TreeNode>{{3, 4}, {4, 6}});
    CHECK(tree_nodes(4, 6, 6) == std::vector<TreeNode>{{4, 6}});
}
