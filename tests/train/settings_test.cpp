// The table of settings: what every row must hold, whatever it is bound to.
#include "train/settings.hpp"

#include <set>
#include <sstream>

#include "base/error.hpp"
#include "tests/support/catch.hpp"
#include "train/checkpoint.hpp"

using namespace gyre;
using namespace gyre::train;

namespace {

// Texts of which every kind of setting takes one.
std::vector<std::string> texts_for(const Setting& row) {
    std::vector<std::string> texts = {
        "7",   "0.25",   "0.25,0.5", "4x7",  "crop4,hflip,rotate10", "true", "7steps",
        "7-9", "env://", "x",        "x.csv"};
    std::istringstream words(row.type);
    for (std::string word; std::getline(words, word, '|');) {
        texts.push_back(word);
    }
    return texts;
}

// Gives the row another value than it has.
void change(const Setting& row) {
    const std::string before = row.value();
    for (const std::string& text : texts_for(row)) {
        if (row.set(text).empty() && row.value() != before) {
            return;
        }
    }
    FAIL("no text changes --" << row.name);
}

bool same_on_resume(const RunSpec& saved, const RunSpec& now) {
    try {
        require_same({values_to_resume(saved), {}}, {values_to_resume(now), {}}, "here", "or not");
    } catch (const Error&) {
        return false;
    }
    return true;
}

}  // namespace

TEST_CASE("every setting has a help text, a heading and a name of its own") {
    RunSpec run;
    std::set<std::string> names;
    for (const Setting& row : settings(run)) {
        INFO(row.name);
        CHECK(names.insert(row.name).second);
        CHECK(row.name.find_first_not_of("abcdefghijklmnopqrstuvwxyz-") == row.name.npos);
        CHECK(!row.help.empty());
        CHECK(!row.heading.empty());
        for (const std::string& other : row.excludes) {
            CHECK(names.contains(other));
        }
        if (!row.short_for.empty()) {
            CHECK(names.contains(row.short_for));
        }
    }
}

TEST_CASE("every setting reads back what it writes, its default and another value") {
    RunSpec run, copy;
    const std::vector<Setting> rows = settings(run), copies = settings(copy);
    for (std::size_t i = 0; i < rows.size(); ++i) {
        INFO(rows[i].name);
        for (const bool changed : {false, true}) {
            if (changed && rows[i].short_for.empty()) {
                change(rows[i]);
            }
            const std::string value = rows[i].value();
            if (!value.empty()) {
                CHECK(copies[i].set(value) == "");
                CHECK(copies[i].value() == value);
            }
        }
    }
}

TEST_CASE("a setting that is refused leaves its field alone, and says what it is given") {
    RunSpec run;
    for (const Setting& row : settings(run)) {
        for (const std::string text : {"", "no such", "-1e999", "nan"}) {
            const std::string before = row.value();
            if (const std::string problem = row.set(text); !problem.empty()) {
                INFO(row.name << " '" << text << "'");
                CHECK(row.value() == before);
                CHECK(problem.find(text) != problem.npos);
            }
        }
    }
}

TEST_CASE("another value is refused on resume, or allowed, as the setting says") {
    RunSpec none;
    for (const Setting& unchanged : settings(none)) {
        RunSpec run;
        const std::vector<Setting> rows = settings(run);
        const Setting& row = *find(rows, unchanged.name);
        change(row);
        const Setting& changed = row.short_for.empty() ? row : *find(rows, row.short_for);
        INFO(row.name);
        CHECK(same_on_resume(run, run));
        CHECK(same_on_resume(none, run) == !changed.must_match_on_resume());
        CHECK(same_on_resume(run, none) == !changed.must_match_on_resume());
        if (row.scope != Scope::all_ranks) {
            CHECK(!row.compared());
            CHECK(!row.must_match_on_resume());
        }
    }
}

TEST_CASE("values are compared, not the texts that they were read from") {
    const auto value_of = [](const std::string& name, const std::string& text) {
        RunSpec run;
        const std::vector<Setting> rows = settings(run);
        INFO(name << " " << text);
        CHECK(find(rows, name)->set(text) == "");
        return find(rows, name)->value();
    };
    for (const char* text : {"0.10", ".1", "1e-1", "+0.1", "0.1"}) {
        CHECK(value_of("lr", text) == "0.1");
    }
    CHECK(value_of("betas", "5e-1,.75") == "0.5,0.75");
    CHECK(value_of("seed", "007") == "7");
    CHECK(value_of("seed", "18446744073709551615") == "18446744073709551615");
    CHECK(value_of("optimizer", "AdamW") == "adamw");
    CHECK(value_of("augment", "mixup0.25,cutmix1") == "mixup0.25,cutmix1");
    CHECK(value_of("augment", "rotate2,hflip") == value_of("augment", "hflip,rotate2"));
    CHECK(value_of("save-every", "2epochs") == "2");
    CHECK(value_of("save-every", "30s") == "30s");
}
