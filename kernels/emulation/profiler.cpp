#include "kernels/emulation/profiler.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <optional>
#include <unordered_map>

#include "base/error.hpp"
#include "kernels/emulation/basic_blocks.hpp"
#include "kernels/emulation/places.hpp"
#include "kernels/emulation/warp.hpp"

namespace simt {

Traffic& Traffic::operator+=(const Traffic& other) {
    requests += other.requests;
    lanes += other.lanes;
    bytes += other.bytes;
    transactions += other.transactions;
    least += other.least;
    return *this;
}

namespace {

using emulator::kWarp;
constexpr unsigned kMostThreads = emulator::kMostClusterThreads, kMostWarps = kMostThreads / kWarp;
constexpr std::uint32_t kSectorBytes = 32, kBanks = 32, kBankBytes = 4;

// The addresses that a warp's lanes requested in one execution of a place.
struct Request {
    std::uint32_t mask = 0;
    std::array<std::uint32_t, kWarp> offset;  // from the beginning of the memory
};

struct Place {
    PlaceProfile profile;
    std::array<std::vector<Request>, kMostWarps> requests;  // of this interval
    std::array<std::uint32_t, kMostThreads> count{};        // per thread, in this interval
    bool touched = false;                                   // in this interval
};

// Sorts values and drops duplicates.
template <typename T, std::size_t kMost>
class Distinct {
 public:
    void add(T value) { values_[size_++] = value; }
    std::size_t finish() {
        std::sort(values_.begin(), values_.begin() + size_);
        size_ = std::unique(values_.begin(), values_.begin() + size_) - values_.begin();
        return static_cast<std::size_t>(size_);
    }
    auto begin() const { return values_.begin(); }
    auto end() const { return values_.begin() + size_; }

 private:
    std::array<T, kMost> values_;
    std::ptrdiff_t size_ = 0;
};

// The number of bytes that the lanes request, counting overlapping ones once.
std::int64_t distinct_bytes(const Request& request, std::uint32_t bytes) {
    Distinct<std::uint32_t, kWarp> begins;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
        if ((request.mask >> lane & 1u) != 0) {
            begins.add(request.offset[lane]);
        }
    }
    begins.finish();
    std::int64_t sum = 0;
    std::uint32_t end = 0;
    for (const std::uint32_t begin : begins) {
        sum += begin + bytes - std::max(begin, std::min(end, begin + bytes));
        end = std::max(end, begin + bytes);
    }
    return sum;
}

// The wavefronts of a request to shared memory, and the minimum for its active lanes.
struct Wavefronts {
    std::int64_t found = 0, least = 0;
};
Wavefronts wavefronts(const Request& request, std::uint32_t bytes) {
    const unsigned group = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
    const std::uint32_t words = std::max(bytes / kBankBytes, 1u);
    Wavefronts result;
    for (unsigned first = 0; first < kWarp; first += group) {
        Distinct<std::uint32_t, 4 * kWarp> distinct;
        bool any = false;
        for (unsigned lane = first; lane < first + group; ++lane) {
            if ((request.mask >> lane & 1u) != 0) {
                any = true;
                for (std::uint32_t word = 0; word < words; ++word) {
                    distinct.add(request.offset[lane] / kBankBytes + word);
                }
            }
        }
        distinct.finish();
        std::array<std::int64_t, kBanks> of_bank{};
        for (const std::uint32_t word : distinct) {
            ++of_bank[word % kBanks];
        }
        result.found += *std::max_element(of_bank.begin(), of_bank.end());
        result.least += any;
    }
    return result;
}

// The sectors of device memory that a launch has touched, each with the block that touched it.
class Footprint {
 public:
    void make(std::size_t memory_bytes) {
        void* memory =
            mmap(nullptr, memory_bytes / kSectorBytes * sizeof(Sector), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) {
            throw gyre::Error(
                gyre::ExitCode::internal,
                "the profiler could not reserve addresses; is there a limit (ulimit -v)?");
        }
        sectors_ = static_cast<Sector*>(memory);
    }
    void begin(std::uint32_t launch) {
        launch_ = launch;
        of_one_ = of_several_ = 0;
    }
    void touch(std::uint32_t sector, std::uint32_t block) {
        Sector& at = sectors_[sector];
        if (at.launch != launch_) {
            at = {launch_, block};
            ++of_one_;
        } else if (at.block != block && at.block != kSeveral) {
            at.block = kSeveral;
            --of_one_;
            ++of_several_;
        }
    }
    // scale: blocks of the grid / executed blocks.
    double bytes(double scale) const {
        return kSectorBytes *
               (static_cast<double>(of_several_) + scale * static_cast<double>(of_one_));
    }

 private:
    static constexpr std::uint32_t kSeveral = 0xffffffffu;
    struct Sector {
        std::uint32_t launch, block;
    };
    Sector* sectors_ = nullptr;
    std::uint32_t launch_ = 0;
    std::int64_t of_one_ = 0, of_several_ = 0;
};

class Profiler final : public emulator::Listener {
 public:
    Profiler() : device_(emulator::device_range()), shared_(emulator::shared_range()) {
        read_.make(static_cast<std::size_t>(device_.end - device_.begin));
        written_.make(static_cast<std::size_t>(device_.end - device_.begin));
        for (const auto& [pc, block] : disassemble()) {
            if (pc >= blocks_.size()) {
                blocks_.resize(pc + 1);
            }
            blocks_[pc] = block;
        }
        code_begin_ = program_begin();
    }

    void access(const void* at, std::uint32_t bytes, bool write, const void* pc) {
        const bool device = device_.contains(at);
        // Asynchronous copies were already counted when they were issued.
        if (emulator::thread == nullptr || emulator::thread->landing ||
            !(device || shared_.contains(at))) {
            return;
        }
        const Space space = device                                                ? Space::global
                            : emulator::shared_rank(at) == emulator::thread->rank ? Space::shared
                                                                                  : Space::remote;
        Place& place =
            place_at(static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(pc) - code_begin_),
                     space, write, bytes);
        const unsigned thread = emulator::thread->id;
        const std::uint32_t nth = place.count[thread]++;
        std::vector<Request>& requests = place.requests[thread / kWarp];
        if (nth >= requests.size()) {
            requests.emplace_back();
        }
        Request& request = requests[nth];
        request.mask |= 1u << thread % kWarp;
        request.offset[thread % kWarp] = static_cast<std::uint32_t>(
            static_cast<const std::byte*>(at) - (device ? device_.begin : shared_.begin));
        if (!place.touched) {
            place.touched = true;
            touched_.push_back(&place);
        }
    }
    void block_of_code(const void* pc) {
        if (emulator::thread == nullptr) {
            return;
        }
        const std::size_t at = reinterpret_cast<std::uintptr_t>(pc) - code_begin_;
        const BasicBlock block = at < blocks_.size() ? blocks_[at] : BasicBlock{};
        const unsigned thread = emulator::thread->id;
        instructions_[thread] += block.instructions;
        flop_[thread] += block.flop;
    }

    // --- what the emulator tells
    void launch_begins(const emulator::Launch& launch) override {
        now_ = {};
        now_.launch = launch;
        threads_ = static_cast<unsigned>(launch.block.count());
        blocks_of_cluster_ = launch.cluster;
        read_.begin(++launches_);
        written_.begin(launches_);
        block_ = 0;
        instructions_of_all_ = instructions_of_busiest_ = 0;
        for (auto& [key, place] : places_) {
            place->profile.traffic = {};
        }
    }
    void blocks_begin() override {
        instructions_.fill(0);
        flop_.fill(0);
        mmas_.fill(0);
    }
    void block_barrier(unsigned rank) override {
        ++now_.barriers;
        end_interval(rank);
    }
    // A thread's work between its arrival and its wait counts towards the previous interval if
    // other threads arrive later.
    void cluster_complete() override {
        now_.cluster_barriers += blocks_of_cluster_;
        end_intervals();
    }
    void warp_operation(unsigned warp, emulator::WarpOperation operation) override {
        ++now_.warp_operations;
        if (const int flop = emulator::mma_flop(operation); flop > 0) {
            ++now_.mmas;
            now_.tensor_flop += flop;
            ++mmas_[warp];
        }
    }
    void blocks_end() override {
        end_intervals();
        for (unsigned rank = 0; rank < blocks_of_cluster_; ++rank) {
            ++block_;
            const auto begin = instructions_.begin() + rank * threads_, end = begin + threads_;
            for (auto each = begin; each != end; ++each) {
                instructions_of_all_ += *each;
            }
            instructions_of_busiest_ += threads_ * *std::max_element(begin, end);
        }
    }
    void launch_ends(std::int64_t blocks_run) override {
        now_.blocks = blocks_run;
        now_.busy = Traffic::ratio(instructions_of_all_, instructions_of_busiest_);
        now_.read_bytes = read_.bytes(now_.scale());
        now_.written_bytes = written_.bytes(now_.scale());
        for (double* sum : {&now_.longest_requests, &now_.longest_fmas, &now_.longest_mmas,
                            &now_.load_phases, &now_.remote_phases}) {
            *sum /= static_cast<double>(std::max<std::int64_t>(blocks_run, 1));
        }
        for (const auto& [key, place] : places_) {
            const PlaceProfile& profile = place->profile;
            if (profile.traffic.requests > 0) {
                now_.places.push_back(profile);
                traffic_of(now_, profile) += profile.traffic;
            }
        }
        std::sort(now_.places.begin(), now_.places.end(),
                  [](const auto& a, const auto& b) { return a.pc < b.pc; });
        done_.push_back(std::move(now_));
    }

    bool knows_code() const { return !blocks_.empty(); }
    std::vector<LaunchProfile> take() { return std::exchange(done_, {}); }

 private:
    Place& place_at(std::uint32_t pc, Space space, bool write, std::uint32_t bytes) {
        const std::uint64_t key =
            (std::uint64_t{pc} << 7 | bytes << 2 | static_cast<unsigned>(space)) << 1 | write;
        if (last_place_ != nullptr && last_key_ == key) {
            return *last_place_;
        }
        std::unique_ptr<Place>& place = places_[key];
        if (place == nullptr) {
            place = std::make_unique<Place>();
            place->profile = {pc, space, write, static_cast<int>(bytes), {}};
        }
        last_key_ = key;
        last_place_ = place.get();
        return *place;
    }

    static Traffic& traffic_of(LaunchProfile& launch, const PlaceProfile& place) {
        switch (place.space) {
            case Space::global:
                return place.write ? launch.global_stores : launch.global_loads;
            case Space::shared:
                return place.write ? launch.shared_stores : launch.shared_loads;
            default:
                return place.write ? launch.remote_stores : launch.remote_loads;
        }
    }

    void end_intervals() {
        for (unsigned rank = 0; rank < blocks_of_cluster_; ++rank) {
            end_interval(rank);
        }
    }
    // All threads of the block are at a barrier or have exited, so no request can get further
    // lanes.
    void end_interval(unsigned rank) {
        std::array<std::int64_t, kMostWarps> requests{};
        bool loads = false, visits = false;
        const unsigned first_warp = rank * threads_ / kWarp;
        const unsigned last_warp = first_warp + threads_ / kWarp;
        for (Place* place : touched_) {
            bool used = false;
            for (unsigned warp = first_warp; warp < last_warp; ++warp) {
                used = used || !place->requests[warp].empty();
                requests[warp] += static_cast<std::int64_t>(place->requests[warp].size());
                for (const Request& request : place->requests[warp]) {
                    count(*place, request);
                }
                place->requests[warp].clear();
            }
            loads =
                loads || (used && place->profile.space == Space::global && !place->profile.write);
            visits = visits || (used && place->profile.space == Space::remote);
            std::fill_n(place->count.begin() + first_warp * kWarp, threads_, 0u);
            place->touched = blocks_of_cluster_ > 1;  // other blocks may be using it
        }
        if (blocks_of_cluster_ == 1) {
            touched_.clear();
        }
        std::int64_t most_fmas = 0;
        for (unsigned warp = first_warp; warp < last_warp; ++warp) {
            const auto first = flop_.begin() + warp * kWarp;
            std::int64_t most = 0;
            for (auto lane = first; lane != first + kWarp; ++lane) {
                now_.flop += *lane;
                most = std::max<std::int64_t>(most, *lane);
                *lane = 0;
            }
            now_.warp_fmas += (most + 1) / 2;
            most_fmas = std::max(most_fmas, (most + 1) / 2);
        }
        now_.longest_fmas += static_cast<double>(most_fmas);
        now_.longest_requests +=
            static_cast<double>(*std::max_element(requests.begin(), requests.end()));
        const auto mmas = mmas_.begin() + first_warp;
        now_.longest_mmas += static_cast<double>(*std::max_element(mmas, mmas + threads_ / kWarp));
        now_.load_phases += loads;
        now_.remote_phases += visits;
        std::fill_n(mmas, threads_ / kWarp, 0);
    }

    void count(Place& place, const Request& request) {
        const auto bytes = static_cast<std::uint32_t>(place.profile.bytes);
        Traffic& traffic = place.profile.traffic;
        ++traffic.requests;
        traffic.lanes += std::popcount(request.mask);
        const std::int64_t asked = distinct_bytes(request, bytes);
        traffic.bytes += asked;
        if (place.profile.space == Space::shared) {
            const Wavefronts waves = wavefronts(request, bytes);
            traffic.transactions += waves.found;
            traffic.least += waves.least;
            return;
        }
        Distinct<std::uint32_t, 2 * kWarp> sectors;
        for (unsigned lane = 0; lane < kWarp; ++lane) {
            if ((request.mask >> lane & 1u) != 0) {
                sectors.add(request.offset[lane] / kSectorBytes);
                sectors.add((request.offset[lane] + bytes - 1) / kSectorBytes);
            }
        }
        traffic.transactions += static_cast<std::int64_t>(sectors.finish());
        traffic.least += (asked + kSectorBytes - 1) / kSectorBytes;
        if (place.profile.space == Space::remote) {
            return;
        }
        Footprint& footprint = place.profile.write ? written_ : read_;
        for (const std::uint32_t sector : sectors) {
            footprint.touch(sector, block_);
        }
    }

    const emulator::Range device_, shared_;
    std::uintptr_t code_begin_ = 0;
    std::vector<BasicBlock> blocks_;  // by code address
    std::unordered_map<std::uint64_t, std::unique_ptr<Place>> places_;
    std::uint64_t last_key_ = 0;
    Place* last_place_ = nullptr;
    std::vector<Place*> touched_;
    Footprint read_, written_;

    LaunchProfile now_;
    std::vector<LaunchProfile> done_;
    std::uint32_t launches_ = 0, block_ = 0;
    unsigned threads_ = 0;  // per block
    unsigned blocks_of_cluster_ = 1;
    std::int64_t instructions_of_all_ = 0, instructions_of_busiest_ = 0;
    std::array<std::int64_t, kMostThreads> instructions_{}, flop_{};  // the latter in this interval
    std::array<std::int64_t, kMostWarps> mmas_{};                     // in this interval
};

Profiler* profiler = nullptr;

}  // namespace

void enable_profiler() {
    if (profiler != nullptr) {
        return;
    }
    if (emulator::listener != &emulator::no_listener) {
        throw gyre::Error(gyre::ExitCode::internal,
                          "enable_profiler(): the checker is enabled already");
    }
    static std::unique_ptr<Profiler> only = std::make_unique<Profiler>();
    emulator::listener = profiler = only.get();
    if (!only->knows_code()) {
        fmt::print(stderr,
                   "profiler: the program's instructions are unknown (is objdump of binutils "
                   "installed, and the program not stripped?), so FLOPs and busy threads are not "
                   "counted\n");
    }
}

std::vector<LaunchProfile> take_profiles() {
    return profiler == nullptr ? std::vector<LaunchProfile>{} : profiler->take();
}

template <bool kWrite, std::size_t kBytes>
[[gnu::always_inline]] inline void access(const void* at, const void* pc, std::size_t bytes) {
    if (profiler != nullptr) {
        profiler->access(at, static_cast<std::uint32_t>(bytes), kWrite, pc);
    }
}
[[gnu::always_inline]] inline void code_reached(const void* pc) {
    if (profiler != nullptr) {
        profiler->block_of_code(pc);
    }
}

}  // namespace simt

#include "kernels/emulation/compiler_hooks.hpp"
