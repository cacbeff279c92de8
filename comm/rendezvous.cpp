// The rendezvous of the ranks: a store over TCP or in a folder, and the meeting held through it.
//
// Over TCP, both sides first send a line that says that this is gyre, and the job's id; then the
// client asks and rank 0 answers, frame by frame (32 bits of length, big endian, and the bytes).
// There is no secret in it: whoever reaches the port can disturb the start, as with mpirun.
#include "comm/rendezvous.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <random>
#include <sstream>
#include <system_error>
#include <thread>

#include "kernels/host_name.hpp"

namespace gyre {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr std::string_view kGreeting = "gyre rendezvous 1\n";
constexpr std::size_t kMostFrameBytes = 16 << 20;
constexpr auto kAskInterval = 10ms;      // for a key that is not there yet
constexpr auto kConnectInterval = 50ms;  // to a rank 0 that is not there yet
constexpr auto kAnswerTime = 3s;         // within which whoever listens must say that it is gyre
constexpr auto kLinger = 300ms;          // in which the others learn that rank 0 gives up

Error meeting_error(const std::string& message) {
    return {ExitCode::communication, message};
}

std::string error_text(int error) {
    return std::generic_category().message(error);
}

class Socket {
 public:
    explicit Socket(int fd = -1) : fd_(fd) {}
    ~Socket() {
        if (fd_ >= 0) {
            close(fd_);
        }
    }
    Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Socket& operator=(Socket&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    int fd() const { return fd_; }

    // Both return false where the other side is gone or takes longer than the socket's timeout;
    // errno says why, and is 0 where the other side closed in an orderly way.
    bool send_all(std::string_view bytes) const {
        while (!bytes.empty()) {
            const ssize_t sent = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
            if (sent < 0 && errno != EINTR) {
                return false;
            }
            bytes.remove_prefix(sent > 0 ? static_cast<std::size_t>(sent) : 0);
        }
        return true;
    }
    bool receive_all(char* data, std::size_t bytes) const {
        while (bytes > 0) {
            const ssize_t received = ::recv(fd_, data, bytes, 0);
            if (received == 0) {
                errno = 0;
                return false;
            }
            if (received < 0 && errno != EINTR) {
                return false;
            }
            data += std::max<ssize_t>(received, 0);
            bytes -= static_cast<std::size_t>(std::max<ssize_t>(received, 0));
        }
        return true;
    }
    std::optional<std::string> receive_frame() const {
        std::uint32_t length = 0;
        if (!receive_all(reinterpret_cast<char*>(&length), sizeof length)) {
            return std::nullopt;
        }
        std::string bytes(ntohl(length), '\0');
        if (bytes.size() > kMostFrameBytes || !receive_all(bytes.data(), bytes.size())) {
            return std::nullopt;
        }
        return bytes;
    }

    void set_timeouts(std::chrono::milliseconds time) const {
        const timeval value{time.count() / 1000, time.count() % 1000 * 1000};
        setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &value, sizeof value);
        setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &value, sizeof value);
        const int yes = 1;
        setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    }

 private:
    int fd_;
};

std::string frame(std::string_view bytes) {
    const std::uint32_t length = htonl(static_cast<std::uint32_t>(bytes.size()));
    std::string text(reinterpret_cast<const char*>(&length), sizeof length);
    return text.append(bytes);
}

struct Addresses {
    addrinfo* first = nullptr;
    ~Addresses() {
        if (first != nullptr) {
            freeaddrinfo(first);
        }
    }
};

// The addresses of a host name, in the system's order, which is the same for all ranks of a host.
std::unique_ptr<Addresses> resolve(const std::string& host, int port) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV;
    auto addresses = std::make_unique<Addresses>();
    const int result =
        getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &addresses->first);
    if (result != 0) {
        throw meeting_error(fmt::format(
            "the host '{}' of rank 0 was not found by {}: {}; check "
            "the name, or give the address",
            host, host_name(),
            result == EAI_SYSTEM ? error_text(errno) : std::string(gai_strerror(result))));
    }
    return addresses;
}

// An address and its port as numbers.
struct Numeric {
    std::string address, port;
    std::string text() const {
        return address.find(':') == std::string::npos ? fmt::format("{}:{}", address, port)
                                                      : fmt::format("[{}]:{}", address, port);
    }
};

Numeric numeric(const sockaddr* address, socklen_t length) {
    std::array<char, NI_MAXHOST> host{};
    std::array<char, NI_MAXSERV> port{};
    if (getnameinfo(address, length, host.data(), host.size(), port.data(), port.size(),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
        return {"an unknown address", "0"};
    }
    return {host.data(), port.data()};
}

// The keys and values that rank 0 serves to the others, by a thread of its own.
class Server {
 public:
    Server(Socket listener, std::string job_id)
        : listener_(std::move(listener)), wake_(eventfd(0, EFD_CLOEXEC)), job_id_(job_id) {
        if (wake_.fd() < 0) {
            throw meeting_error(fmt::format("eventfd failed: {}", error_text(errno)));
        }
        thread_ = std::thread([this] { serve(); });
    }
    ~Server() {
        const std::uint64_t one = 1;
        if (write(wake_.fd(), &one, sizeof one) == sizeof one) {
            thread_.join();
        } else {
            thread_.detach();  // cannot happen to an eventfd that nobody else writes to
        }
    }

    bool set(const std::string& key, const std::string& value) {
        const std::lock_guard lock(mutex_);
        return values_.emplace(key, value).second;
    }
    std::optional<std::string> find(const std::string& key) {
        const std::lock_guard lock(mutex_);
        const auto entry = values_.find(key);
        return entry == values_.end() ? std::nullopt : std::optional(entry->second);
    }

 private:
    struct Client {
        Socket socket;
        bool greeted = false;
        std::string received;
    };

    void serve() {
        std::vector<Client> clients;
        for (;;) {
            std::vector<pollfd> waits = {{wake_.fd(), POLLIN, 0}, {listener_.fd(), POLLIN, 0}};
            for (const Client& client : clients) {
                waits.push_back({client.socket.fd(), POLLIN, 0});
            }
            if (poll(waits.data(), waits.size(), -1) < 0 && errno != EINTR) {
                return;  // the others will miss rank 0's answers, and say so
            }
            if (waits[0].revents != 0) {
                return;
            }
            std::vector<Client> kept;
            for (std::size_t i = 0; i < clients.size(); ++i) {
                if (waits[i + 2].revents == 0 || answer(clients[i])) {
                    kept.push_back(std::move(clients[i]));
                }
            }
            clients = std::move(kept);
            if (waits[1].revents != 0) {
                Socket socket(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC));
                if (socket.fd() >= 0) {
                    socket.set_timeouts(kAnswerTime);
                    if (socket.send_all(std::string(kGreeting) + frame(job_id_))) {
                        clients.push_back({std::move(socket), false, {}});
                    }
                }
            }
        }
    }

    // False where the client is gone or is no gyre.
    bool answer(Client& client) {
        std::array<char, 1 << 16> buffer;
        const ssize_t bytes = recv(client.socket.fd(), buffer.data(), buffer.size(), MSG_DONTWAIT);
        if (bytes <= 0) {
            return bytes < 0 && (errno == EAGAIN || errno == EINTR);
        }
        std::string& received = client.received;
        received.append(buffer.data(), static_cast<std::size_t>(bytes));
        if (!client.greeted) {
            const auto shown = std::string_view(received).substr(0, kGreeting.size());
            if (shown != kGreeting.substr(0, shown.size())) {
                return false;
            }
            if (shown.size() < kGreeting.size()) {
                return true;
            }
            received.erase(0, kGreeting.size());
            client.greeted = true;
        }
        for (;;) {
            std::uint32_t length = 0;
            if (received.size() < sizeof length) {
                return true;
            }
            std::memcpy(&length, received.data(), sizeof length);
            length = ntohl(length);
            if (length > kMostFrameBytes) {
                return false;
            }
            if (received.size() < sizeof length + length) {
                return true;
            }
            const std::string reply = handle(received.substr(sizeof length, length));
            received.erase(0, sizeof length + length);
            if (!client.socket.send_all(frame(reply))) {
                return false;
            }
        }
    }

    // "F" and a key, or "S", a key, a zero and a value; answered by "1" (and the value) or "0".
    std::string handle(const std::string& request) {
        const std::size_t zero = request.find('\0');
        if (request.starts_with('S') && zero != std::string::npos) {
            return set(request.substr(1, zero - 1), request.substr(zero + 1)) ? "1" : "0";
        }
        if (request.starts_with('F')) {
            const auto value = find(request.substr(1));
            return value ? "1" + *value : "0";
        }
        return "0";
    }

    Socket listener_, wake_;
    std::string job_id_;
    std::mutex mutex_;
    std::map<std::string, std::string> values_;
    std::thread thread_;
};

class TcpStore final : public Store {
 public:
    TcpStore(const StartUp& start_up, double timeout_seconds) : start_up_(start_up) {
        deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(timeout_seconds));
        address_ = start_up.host;
        port_ = std::to_string(start_up.ports.front());
        start_up.rank == 0 ? listen() : connect();
    }

    bool set(const std::string& key, const std::string& value) override {
        return server_ ? server_->set(key, value) : ask("S" + key + '\0' + value) == "1";
    }
    std::optional<std::string> find(const std::string& key) override {
        if (server_) {
            return server_->find(key);
        }
        const std::string reply = ask("F" + key);
        return reply.starts_with('1') ? std::optional(reply.substr(1)) : std::nullopt;
    }
    std::string where() const override {
        return fmt::format("tcp://{}", Numeric{start_up_.host, port_}.text());
    }
    std::string remedy() const override {
        return "wait for the other job's end, or choose another port";
    }
    std::string local_address() const override { return address_; }

 private:
    void listen();
    void connect();
    // Empty where a job of this id answers; otherwise what is wrong. `fatal`: retrying is no use.
    std::string try_connect(int port, bool& fatal);

    std::string ask(const std::string& request) {
        if (connection_.send_all(frame(request))) {
            if (auto reply = connection_.receive_frame()) {
                return *reply;
            }
        }
        throw meeting_error(
            fmt::format("rank 0 at {} closed the connection during the start ({}); see its message",
                        where(), errno == 0 ? "its process has ended" : error_text(errno)));
    }

    StartUp start_up_;
    std::string address_, port_;
    std::unique_ptr<Server> server_;  // on rank 0
    Socket connection_;               // on the others
};

void TcpStore::listen() {
    std::string taken;
    for (const int port : start_up_.ports) {
        const auto addresses = resolve(start_up_.host, port);
        for (const addrinfo* at = addresses->first; at != nullptr; at = at->ai_next) {
            Socket listener(::socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, 0));
            const int yes = 1;
            if (listener.fd() >= 0) {
                // A port whose last job has just ended can be used at once.
                setsockopt(listener.fd(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
            }
            if (listener.fd() < 0 || bind(listener.fd(), at->ai_addr, at->ai_addrlen) != 0 ||
                ::listen(listener.fd(), SOMAXCONN) != 0) {
                const int error = errno;
                if (error == EADDRINUSE) {
                    port_ = std::to_string(port);
                    bool fatal = false;
                    const std::string reason = try_connect(port, fatal);
                    taken =
                        fmt::format("rank 0 cannot listen on {}: {}; {}", where(),
                                    reason.empty() ? "a gyre job already does" : reason, remedy());
                    break;
                }
                if (taken.empty()) {
                    taken = fmt::format(
                        "rank 0 cannot listen on {}: {}; give an address of this "
                        "host ({}), where rank 0 runs",
                        numeric(at->ai_addr, at->ai_addrlen).text(), error_text(error),
                        host_name());
                }
                continue;
            }
            const Numeric name = numeric(at->ai_addr, at->ai_addrlen);
            address_ = name.address;
            port_ = name.port;
            server_ = std::make_unique<Server>(std::move(listener), start_up_.job_id);
            return;
        }
    }
    throw meeting_error(taken);
}

std::string TcpStore::try_connect(int port, bool& fatal) {
    std::string trouble;
    const auto addresses = resolve(start_up_.host, port);
    for (const addrinfo* at = addresses->first; at != nullptr; at = at->ai_next) {
        const std::string name = numeric(at->ai_addr, at->ai_addrlen).text();
        Socket socket(::socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, 0));
        if (socket.fd() < 0) {
            trouble = error_text(errno);
            continue;
        }
        // Also the longest that connect() takes, for a host that does not answer at all.
        socket.set_timeouts(kAnswerTime);
        if (::connect(socket.fd(), at->ai_addr, at->ai_addrlen) != 0) {
            trouble =
                fmt::format("{}: {}", name, errno == EINPROGRESS ? "no answer" : error_text(errno));
            continue;
        }
        std::string greeting(kGreeting.size(), '\0');
        const bool greeted = socket.send_all(kGreeting) &&
                             socket.receive_all(greeting.data(), greeting.size()) &&
                             greeting == kGreeting;
        const auto job = greeted ? socket.receive_frame() : std::nullopt;
        if (!job) {
            trouble = fmt::format("what listens there is not gyre (another program uses {})", name);
            fatal = true;
            continue;
        }
        if (*job != start_up_.job_id) {
            trouble = fmt::format("another gyre job uses {} (its job id is '{}', this one's '{}')",
                                  name, *job, start_up_.job_id);
            fatal = true;
            continue;
        }
        sockaddr_storage local{};
        socklen_t length = sizeof local;
        if (getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&local), &length) != 0) {
            trouble = error_text(errno);
            continue;
        }
        address_ = numeric(reinterpret_cast<sockaddr*>(&local), length).address;
        port_ = std::to_string(port);
        connection_ = std::move(socket);
        return {};
    }
    return trouble;
}

void TcpStore::connect() {
    for (;;) {
        std::string trouble;
        for (const int port : start_up_.ports) {
            bool fatal = false;
            trouble = try_connect(port, fatal);
            if (trouble.empty()) {
                return;
            }
            // Among several ports, others' are passed over.
            if (fatal && start_up_.ports.size() == 1) {
                throw meeting_error(
                    fmt::format("rank {} cannot join at {}: {}; choose another "
                                "port, or --job-id for jobs on one port",
                                start_up_.rank, where(), trouble));
            }
        }
        if (Clock::now() + kConnectInterval > deadline) {
            throw meeting_error(fmt::format(
                "rank {} on {} has not found rank 0 at {} within --init-timeout: {}; missing: "
                "rank 0 (the others meet there). Start rank 0 with the same --init-method, on the "
                "host of that address, and check that no firewall closes the port",
                start_up_.rank, host_name(), where(), trouble));
        }
        std::this_thread::sleep_for(kConnectInterval);
    }
}

// Keys are files in a folder that rank 0 makes; each is written elsewhere first and then linked to
// its name, which fails where the name is taken, on network file systems too.
class FileStore final : public Store {
 public:
    FileStore(const StartUp& start_up, double timeout_seconds) : start_up_(start_up) {
        deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(timeout_seconds));
        std::error_code error;
        if (start_up.rank == 0) {
            // A file in its place, or a folder that is not there, is told by what cannot be
            // written.
            made_ = std::filesystem::create_directory(start_up.path, error);
        }
    }
    ~FileStore() override {
        if (start_up_.rank != 0 || !own_) {
            return;
        }
        std::error_code ignored;
        for (const auto& entry : std::filesystem::directory_iterator(start_up_.path, ignored)) {
            if (entry.path().filename().string().starts_with("gyre.")) {
                std::filesystem::remove(entry.path(), ignored);
            }
        }
        if (made_) {
            std::filesystem::remove(start_up_.path, ignored);
        }
    }

    bool set(const std::string& key, const std::string& value) override {
        const auto name = file(key);
        const auto draft = file(fmt::format("{}.draft-{}-{}", key, host_name(), getpid()));
        std::ofstream out(draft, std::ios::binary);
        out << value;
        out.close();
        if (!out) {
            throw meeting_error(
                fmt::format("--init-method {}: cannot write {}: {}; the path must "
                            "be a new folder in one that all ranks can write to",
                            where(), draft.string(), error_text(errno)));
        }
        const int result = link(draft.c_str(), name.c_str());
        const int error = errno;
        unlink(draft.c_str());
        if (result != 0 && error != EEXIST) {
            throw meeting_error(fmt::format("--init-method {}: cannot write {}: {}", where(),
                                            name.string(), error_text(error)));
        }
        own_ = own_ || result == 0;
        return result == 0;
    }
    std::optional<std::string> find(const std::string& key) override {
        std::ifstream in(file(key), std::ios::binary);
        if (!in) {
            return std::nullopt;
        }
        return std::string(std::istreambuf_iterator<char>(in), {});
    }
    std::string where() const override { return fmt::format("file://{}", start_up_.path.string()); }
    std::string remedy() const override {
        return fmt::format("give each job a path of its own, or remove {} if that job has ended",
                           start_up_.path.string());
    }

 private:
    std::filesystem::path file(std::string key) const {
        std::replace(key.begin(), key.end(), '/', '.');
        return start_up_.path / ("gyre." + key);
    }
    StartUp start_up_;
    bool made_ = false, own_ = false;
};

// What each rank says of itself, line by line.
struct RankFacts {
    std::string version, world_size, job_id, host, machine, process, nonce, time;
    std::string text() const {
        return fmt::format("{}\n{}\n{}\n{}\n{}\n{}\n{}\n{}\n", version, world_size, job_id, host,
                           machine, process, nonce, time);
    }
    static RankFacts parse(const std::string& text) {
        RankFacts facts;
        std::istringstream in(text);
        for (std::string* line : {&facts.version, &facts.world_size, &facts.job_id, &facts.host,
                                  &facts.machine, &facts.process, &facts.nonce, &facts.time}) {
            std::getline(in, *line);
        }
        return facts;
    }
    std::string who() const {
        return fmt::format("process {} on {}, started {}", process, host, time);
    }
};

RankFacts own_facts(const StartUp& start_up) {
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    std::random_device random;
    std::array<char, 32> time{};
    const std::time_t now = std::time(nullptr);
    std::tm calendar{};
    localtime_r(&now, &calendar);
    std::strftime(time.data(), time.size(), "%Y-%m-%d %H:%M:%S", &calendar);
    std::string job_id = start_up.job_id;
    std::replace(job_id.begin(), job_id.end(), '\n', ' ');
    return {GYRE_VERSION,
            std::to_string(start_up.world_size),
            job_id,
            host_name(),
            host_name() + "/" + boot,
            std::to_string(getpid()),
            fmt::format("{:08x}{:08x}", random(), random()),
            time.data()};
}

std::string rank_key(int rank) {
    return fmt::format("rank/{}", rank);
}

// Refuses what does not belong to rank 0's job.
void require_same_job(const Store& store, const RankFacts& mine, const RankFacts& root, int rank) {
    const auto require = [&](const char* what, const std::string& here, const std::string& there) {
        if (here != there) {
            throw meeting_error(fmt::format(
                "rank {} was started with {} '{}', but rank 0 at {} with '{}' ({}): start all "
                "ranks alike; if that is another job, {}",
                rank, what, here, store.where(), there, root.who(), store.remedy()));
        }
    };
    require("job id", mine.job_id, root.job_id);
    require("world size", mine.world_size, root.world_size);
    require("gyre version", mine.version, root.version);
}

// Waits for a key of the meeting; at the deadline, says who has not come.
std::string await(Store& store, const std::string& key, int world_size) {
    for (;;) {
        if (auto value = store.find(key)) {
            return *value;
        }
        if (const auto failure = store.find("failed")) {
            throw meeting_error(*failure);
        }
        if (Clock::now() > store.deadline) {
            std::vector<int> missing;
            std::string refused;
            for (int rank = 0; rank < world_size; ++rank) {
                if (!store.find(rank_key(rank))) {
                    missing.push_back(rank);
                    if (const auto text = store.find(fmt::format("refused/{}", rank))) {
                        refused += fmt::format("\n  refused: {}", *text);
                    }
                }
            }
            if (missing.empty()) {
                throw meeting_error(fmt::format("rank 0 at {} has stopped answering; {}",
                                                store.where(), store.remedy()));
            }
            if (missing.front() == 0) {  // the others come only after it
                missing = {0};
            }
            throw meeting_error(fmt::format(
                "{} of {} ranks did not come to {} within --init-timeout; missing: rank{} {}. "
                "Start them with the same --init-method and --world-size, check that they reach "
                "that address, or raise --init-timeout{}",
                missing.size(), world_size, store.where(), missing.size() == 1 ? "" : "s",
                fmt::join(missing, ", "), refused));
        }
        std::this_thread::sleep_for(kAskInterval);
    }
}

}  // namespace

std::string Store::get(const std::string& key) {
    for (;;) {
        if (auto value = find(key)) {
            return *value;
        }
        if (Clock::now() > deadline) {
            throw meeting_error(
                fmt::format("'{}' was not said at {} within --init-timeout; a rank "
                            "may have ended during the start",
                            key, where()));
        }
        std::this_thread::sleep_for(kAskInterval);
    }
}

std::unique_ptr<Store> make_tcp_store(const StartUp& start_up, double timeout_seconds) {
    return std::make_unique<TcpStore>(start_up, timeout_seconds);
}

std::unique_ptr<Store> make_file_store(const StartUp& start_up, double timeout_seconds) {
    return std::make_unique<FileStore>(start_up, timeout_seconds);
}

Place meet(Store& store, const StartUp& start_up) {
    const int rank = start_up.rank, size = start_up.world_size;
    const RankFacts mine = own_facts(start_up);
    bool joined = false;
    std::vector<RankFacts> all;
    try {
        if (rank == 0) {
            joined = store.set(rank_key(0), mine.text());
        } else {
            const RankFacts root = RankFacts::parse(await(store, rank_key(0), size));
            try {
                require_same_job(store, mine, root, rank);
            } catch (const Error& error) {
                store.set(fmt::format("refused/{}", rank), error.what());
                throw;
            }
            joined = store.set(rank_key(rank), mine.text());
        }
        if (!joined) {
            const RankFacts first = RankFacts::parse(store.find(rank_key(rank)).value_or(""));
            throw meeting_error(fmt::format(
                "rank {} is already at {} ({}): another rank has the same --rank, or this is "
                "another or an earlier job's; {}",
                rank, store.where(), first.who(), store.remedy()));
        }
        std::string nonces;
        for (int other = 0; other < size; ++other) {
            all.push_back(RankFacts::parse(await(store, rank_key(other), size)));
            nonces += all.back().nonce + ' ';
        }
        // Whoever is there must be there now: rank 0 answers with what each of them has just made
        // up, which what an earlier job left behind cannot.
        if (rank == 0) {
            store.set("all", nonces);
        } else if (await(store, "all", size) != nonces) {
            throw meeting_error(fmt::format("what is at {} is another or an earlier job's; {}",
                                            store.where(), store.remedy()));
        }
    } catch (const Error& error) {
        if (joined) {
            try {
                store.set("failed", fmt::format("rank {} on {} gave up the start: {}", rank,
                                                host_name(), error.what()));
            } catch (const Error&) {
                // The others will meet their own deadline.
            }
            if (rank == 0) {
                std::this_thread::sleep_for(kLinger);
            }
        }
        throw;
    }
    Place place;
    place.host = mine.host;
    place.machine = mine.machine;
    for (int other = 0; other < size; ++other) {
        const bool here = all[static_cast<std::size_t>(other)].machine == mine.machine;
        place.one_host = place.one_host && here;
        place.local_rank += here && other < rank ? 1 : 0;
        place.local_size += here && other != rank ? 1 : 0;
    }
    place.local_rank = start_up.local_rank.value_or(place.local_rank);
    place.local_size = start_up.local_size.value_or(place.local_size);
    return place;
}

}  // namespace gyre
