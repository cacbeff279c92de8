// The receipt of a training: the file receipt.jsonl beside its checkpoints, which says what was
// trained, and by hashes what had come of it at each checkpoint and each epoch's end. Whoever
// trains the same again can compare. docs/receipts.md describes the lines.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>

#include "train/checkpoint.hpp"
#include "train/fit.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

struct Receipt {
    std::string version;                         // of gyre
    Values settings;                             // that are not the defaults
    Identity identity;                           // what the ranks had, and what follows
    std::map<std::int64_t, std::string> hashes;  // by the number of steps done
};

std::filesystem::path receipt_file(const std::filesystem::path& folder);
// text: of a receipt. A line that was cut off as it was written does not count. Throws
// Error(bad_input) that begins with the place and names the line.
Receipt parse_receipt(const std::string& text, const std::string& place);

// Collective. A hash of the names and values of the parameters and the optimiser's state, which
// does not depend on who has what of them; on rank 0.
std::string state_hash(Session& session);

// Writes the receipt. Only rank 0 has the file; all is collective.
class ReceiptWriter final : public FitObserver {
 public:
    // The objects must outlive this one; identity may be completed until the training starts.
    ReceiptWriter(const RunSpec& run, const Identity& identity, bool is_root)
        : run_(run), identity_(identity), is_root_(is_root) {}

    void on_start(const Training& training) override;
    bool pauses_after(std::int64_t steps) override;
    void on_pause(const Training& training) override;
    void on_epoch(const Training& training, const EpochFacts& epoch) override;

 private:
    void add(const Training& training);
    void write(const std::string& line);

    const RunSpec& run_;
    const Identity& identity_;
    const bool is_root_;
    bool due_ = false;
    std::ofstream file_;
};

// Compares a training with a receipt, and ends it after the receipt's last hash.
class Verification final : public FitObserver {
 public:
    // receipt: the same on all ranks. folder: of its training, whose checkpoints tell more of a
    // difference.
    Verification(Receipt receipt, std::filesystem::path folder)
        : receipt_(std::move(receipt)), folder_(std::move(folder)) {}

    const Receipt& receipt() const { return receipt_; }
    std::string place() const { return receipt_file(folder_).string(); }
    // The steps up to which the training was the same, and the hashes compared.
    std::int64_t same_until() const { return same_until_; }
    int compared() const { return compared_; }

    void on_start(const Training& training) override;
    bool pauses_after(std::int64_t steps) override;
    void on_pause(const Training& training) override { compare(training); }
    void on_epoch(const Training& training, const EpochFacts&) override { compare(training); }
    bool ends() override;

 private:
    // Throws AgreedError(differs).
    void compare(const Training& training);
    // Where the state differs from the training's checkpoint after these steps; empty: there is
    // none. On rank 0.
    std::string difference(const Training& training, const std::vector<HostTensor>& state) const;

    const Receipt receipt_;
    const std::filesystem::path folder_;
    std::int64_t same_until_ = 0;
    int compared_ = 0;
};

}  // namespace gyre::train
