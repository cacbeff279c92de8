// Philox against the known answers of its authors' Random123 library (kat_vectors).
#include "base/philox.hpp"
#include "tests/support/catch.hpp"

using namespace gyre;

TEST_CASE("Philox 4x32-10 gives the published known answers") {
    struct Known {
        std::uint64_t key;
        Philox4 counter, expected;
    };
    const Known known[] = {
        {0, {{0, 0, 0, 0}}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
        {~std::uint64_t{0},
         {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
         {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
        {0x299f31d0a4093822,
         {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
         {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
    };
    for (const Known& k : known) {
        const Philox4 found = philox4x32_10(k.key, k.counter);
        for (int i = 0; i < 4; ++i) {
            CHECK(found.word[i] == k.expected.word[i]);
        }
    }
}

TEST_CASE("streams differ in every part of their key") {
    const RandomStream base{1, RandomPurpose::dropout, 1, 1};
    const auto first = base.word(0, 0);
    CHECK(first != RandomStream{2, RandomPurpose::dropout, 1, 1}.word(0, 0));
    CHECK(first != RandomStream{1, RandomPurpose::order, 1, 1}.word(0, 0));
    CHECK(first != RandomStream{1, RandomPurpose::dropout, 2, 1}.word(0, 0));
    CHECK(first != RandomStream{1, RandomPurpose::dropout, 1, 2}.word(0, 0));
    CHECK(first != base.word(1, 0));
    CHECK(first != base.word(0, 1));
    CHECK(first != base.word(0, 4));
}
