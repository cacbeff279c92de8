// The receipt of a training: the file receipt.jsonl beside its checkpoints, which records what was
// trained and a hash of the state at each checkpoint and each epoch's end, so that anybody who
// trains the same again can compare. docs/receipts.md describes its lines.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "train/checkpoint.hpp"
#include "train/fit.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

struct Receipt {
    std::string version;                         // of gyre
    Values settings;                             // those that are not the defaults
    Identity identity;                           // as in its checkpoints
    std::map<std::int64_t, std::string> hashes;  // by the number of steps done
};

std::filesystem::path receipt_file(const std::filesystem::path& folder);
// Returns what the text of a receipt says; a last line that was cut off as it was written does not
// count. Throws Error(bad_input) that begins with the place and names the line.
Receipt parse_receipt(const std::string& text, const std::string& place);

// Collective. Returns a hash of the names and values of the parameters, of rank 0's running
// statistics and of the optimiser's state, which does not depend on how the ranks share them.
std::string state_hash(Session& session);

// Writes the receipt. Only rank 0 has the file, but all functions are collective.
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
    // receipt: the same on all ranks. folder: where its training saved, for its checkpoints tell
    // more of a difference.
    Verification(Receipt receipt, std::filesystem::path folder)
        : receipt_(std::move(receipt)), folder_(std::move(folder)) {}

    const Receipt& receipt() const { return receipt_; }
    std::string place() const { return receipt_file(folder_).string(); }
    // Hashes of later steps than this checkpoint's do not count.
    void end_at(const Cursor& checkpoint) { end_ = checkpoint; }
    // The step of the last hash that counts, once the training has started.
    std::int64_t last() const { return last_; }
    // The number of steps up to which the trainings are known to be the same, and that of the
    // hashes compared.
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
    // Describes, on rank 0, where the state differs from the training's checkpoint of this step.
    std::string difference(const Training& training, const std::vector<HostTensor>& state) const;

    const Receipt receipt_;
    const std::filesystem::path folder_;
    std::optional<Cursor> end_;
    std::int64_t last_ = 0, same_until_ = 0;
    int compared_ = 0;
};

}  // namespace gyre::train
