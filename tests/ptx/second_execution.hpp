// Each launch of the emulated GPU is run a second time, by the PTX of its kernel and from the same
// memory; what memory holds afterwards must be the same, bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "kernels/emulation/emulator.hpp"
#include "tests/ptx/library.hpp"
#include "tests/ptx/run.hpp"

namespace gyre::ptx {

// The outcome of the launches of one kernel on one architecture.
struct Tally {
    std::int64_t launches = 0, different = 0, failed = 0;
    std::uint64_t instructions = 0;
    double seconds = 0.0;  // of the PTX
    std::string first;     // the first difference or failure
    bool good() const { return launches > 0 && different == 0 && failed == 0; }
};

// Listens to the emulator as long as it lives; memory must be allocated meanwhile. Tests repeat
// their launches, under other schedules: launches that differ at most in their pointers are run
// twice.
class SecondExecution : public simt::emulator::Listener {
 public:
    // Launches run by the PTX of the first architecture, and by that of the others where they have
    // other code for a kernel.
    explicit SecondExecution(std::vector<const Library*> libraries);
    ~SecondExecution() override;
    SecondExecution(const SecondExecution&) = delete;
    SecondExecution& operator=(const SecondExecution&) = delete;

    // By architecture and by the kernel's name, without the arguments of templates.
    using Tallies = std::map<std::pair<std::string, std::string>, Tally>;
    const Tallies& tallies() const { return tallies_; }
    Tally total() const;
    // Kernels of the first architecture, by file and name without the arguments of templates, and
    // of each the instances that no launch has reached, and how many there are.
    struct Coverage {
        std::vector<std::string> not_reached;
        std::size_t instances = 0;
    };
    std::map<std::string, Coverage> coverage() const;
    // Kernels of a further architecture with other code than the first one's, and all of them.
    std::pair<std::size_t, std::size_t> with_other_code(std::size_t library) const;

 private:
    using Bytes = std::vector<std::byte>;
    struct Allocation {
        std::byte* at;
        std::size_t bytes;
    };

    void launch_begins(const simt::emulator::Launch& launch) override;
    void launch_ends(std::int64_t blocks_run) override;
    void device_allocated(void* at, std::size_t bytes) override;
    void device_released(void* at, std::size_t bytes) override;

    bool is_known();
    void choose_allocations();
    void save(std::vector<Bytes>& to) const;
    void restore(const std::vector<Bytes>& from) const;
    std::string difference() const;
    void run_on(std::size_t library);
    bool other_code(std::size_t library, const Entry& first) const;

    std::vector<const Library*> libraries_;
    simt::emulator::Listener* before_us_;
    std::map<std::byte*, std::size_t> memory_;
    const simt::emulator::Launch* launch_ = nullptr;  // under way
    std::vector<Allocation> chosen_;                  // that the launch's arguments point to
    std::vector<Bytes> before_, after_;               // what was in them
    Tallies tallies_;
    std::set<std::string> reached_;      // mangled
    std::map<std::string, int> shapes_;  // of launches, and how often each was run
    mutable std::map<std::pair<std::size_t, std::string>, bool> other_code_;
};

}  // namespace gyre::ptx
