// Starting without mpirun: ranks that find each other by flags and environments, over Gloo, and
// what a user sees where they do not.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <sstream>
#include <thread>

#include "comm/launch/socket.hpp"
#include "kernels/base/host_name.hpp"
#include "tests/catch.hpp"
#include "tests/losses.hpp"
#include "tests/temp_dir.hpp"

using namespace gyre::test;

namespace {

// A listening socket, and a port that nobody else listens on once it is closed.
struct Listener {
    int fd, port;
    explicit Listener(in_addr_t host = INADDR_LOOPBACK)
        : fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), port(0) {
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(host);
        socklen_t length = sizeof address;
        REQUIRE(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
        REQUIRE(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0);
        REQUIRE(listen(fd, 8) == 0);
        port = ntohs(address.sin_port);
    }
    ~Listener() { close(fd); }
    Listener(const Listener&) = delete;
    Listener& operator=(const Listener&) = delete;
};

int free_port() {
    return Listener().port;
}

// Shell commands at the same time, each to its end.
class Jobs {
 public:
    // `environment`: NAME=VALUE ... in front of the program.
    void start(const std::string& arguments, const std::string& environment = {}) {
        running_.push_back(
            std::async(std::launch::async, run_shell,
                       environment + " timeout -k 1 120 " + gyre_command(0, "") + arguments));
    }
    void start_shell(const std::string& command) {
        running_.push_back(std::async(std::launch::async, run_shell, command));
    }
    std::vector<Outcome> wait() {
        std::vector<Outcome> outcomes;
        for (auto& job : running_) {
            outcomes.push_back(job.get());
        }
        running_.clear();
        return outcomes;
    }

 private:
    std::vector<std::future<Outcome>> running_;
};

// Speaks to a meeting as a rank does, and says what it likes.
class Stranger {
 public:
    // Host: 127.0.0.x. Waits for rank 0 to listen there.
    explicit Stranger(int port, int host = 1) {
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(0x7f000000U + static_cast<in_addr_t>(host));
        address.sin_port = htons(static_cast<std::uint16_t>(port));
        for (int i = 0; i < 300; ++i) {
            socket_ = gyre::comm::Socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
            socket_.set_timeouts(std::chrono::seconds(10));
            if (connect(socket_.fd(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) {
                constexpr std::string_view greeting = "gyre rendezvous 1\n";
                std::string theirs(greeting.size(), ' ');
                REQUIRE(socket_.send_all(greeting));
                REQUIRE(socket_.receive_all(theirs.data(), theirs.size()));
                REQUIRE(socket_.receive_frame(100));
                return;
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
        }
        FAIL("rank 0 does not listen");
    }
    bool send(const std::string& bytes) { return socket_.send_all(bytes); }
    // Nothing: the connection was closed.
    std::optional<std::string> ask(const std::string& request) {
        return send(gyre::comm::frame(request)) ? socket_.receive_frame(1 << 20) : std::nullopt;
    }
    std::string set(const std::string& key, const std::string& value) {
        return ask("S" + key + '\0' + value).value_or("closed");
    }
    // Waits for it.
    std::string get(const std::string& key) {
        for (int i = 0; i < 500; ++i) {
            const auto reply = ask("F" + key);
            REQUIRE(reply);
            if (reply->starts_with('1')) {
                return reply->substr(1);
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
        FAIL(key << " is not said");
        return {};
    }
    bool closed() {
        char byte = 0;
        return !socket_.receive_all(&byte, 1) && errno != EAGAIN;
    }
    // Comes as a rank on another host of this name.
    void join(int rank, const std::string& host) {
        std::istringstream lines(get("rank/0"));
        std::string facts, line;
        for (int at = 0; std::getline(lines, line); ++at) {
            facts += (at == 3 ? host : at == 4 ? "elsewhere" : line) + "\n";
        }
        REQUIRE(set("rank/" + std::to_string(rank), facts) == "1");
        get("all");
    }
    // Says where Gloo finds this rank of a context: at addresses like rank 0's, but of this host
    // and port.
    void say_address(const std::string& context, int rank, in_addr_t host, int port) {
        const std::string number = std::to_string(rank);
        REQUIRE(set(context + "/rank_" + number, "elsewhere") == "1");
        std::string bytes = get(context + "/0");
        REQUIRE(bytes.size() % kGlooAddress == 0);
        sockaddr_in address{};
        for (std::size_t at = 0; at < bytes.size(); at += kGlooAddress) {
            std::memcpy(&address, bytes.data() + at, sizeof address);
            address.sin_addr.s_addr = htonl(host);
            address.sin_port = htons(static_cast<std::uint16_t>(port));
            std::memcpy(bytes.data() + at, &address, sizeof address);
        }
        REQUIRE(set(context + "/" + number, bytes) == "1");
    }

 private:
    static constexpr std::size_t kGlooAddress = sizeof(sockaddr_storage) + 8;
    gyre::comm::Socket socket_;
};

void sleep_ms(int time) {
    std::this_thread::sleep_for(std::chrono::milliseconds(time));
}

struct Training {
    TempDir dir;
    std::string data, flags;
    Training() : data((dir.path() / "set").string()) {
        make_dataset(data, 743, 100, 1, 28, 28, 10);
        // 743 = 12 * 60 + 23: the last batch is uneven.
        flags = "train --threads 1 --data " + data +
                " --global-batch 60 --seed 7 --lr 0.05 --bucket-kib 8 "
                "--log-interval 1 --init-timeout 60" +
                kSmoothNet;
    }
    std::string file(const std::string& name) const { return (dir.path() / name).string(); }

    // Starts the ranks in this order, some time apart, and compares with the single rank's losses.
    void check(const std::string& method, int ranks, const std::vector<int>& order) {
        Jobs jobs;
        const std::string json = "ranks.jsonl";
        for (const int rank : order) {
            jobs.start(flags + "--epochs 2 --json " + file(json) + " --init-method " + method +
                       " --rank " + std::to_string(rank) + " --world-size " +
                       std::to_string(ranks));
            sleep_ms(150);
        }
        compare(jobs.wait(), ranks, json);
    }
    void compare(const std::vector<Outcome>& outcomes, int ranks, const std::string& json) {
        for (const Outcome& outcome : outcomes) {
            INFO(outcome.output);
            REQUIRE(outcome.exit_code == 0);
        }
        if (one_.empty()) {
            const Outcome single = run_gyre(0, flags + "--epochs 2 --json " + file("one.jsonl"));
            INFO(single.output);
            REQUIRE(single.exit_code == 0);
            one_ = step_losses(file("one.jsonl"));
            REQUIRE(one_.size() == 26);
        }
        CHECK(read_events(file(json), "start").at(0).at("ranks") == ranks);
        CHECK(largest_difference(step_losses(file(json)), one_) <= kSameLosses);
    }

 private:
    std::vector<double> one_;
};

void expect(const Outcome& outcome, int code, std::initializer_list<std::string> parts) {
    INFO(outcome.output);
    CHECK(outcome.exit_code == code);
    for (const std::string& part : parts) {
        INFO("expected to contain: " << part);
        CHECK(outcome.output.find(part) != std::string::npos);
    }
}

std::string tcp(int port, const std::string& host = "127.0.0.1") {
    return "tcp://" + host + ":" + std::to_string(port);
}

// The flags of one rank of a job that needs none of its data to fail.
std::string rank_flags(const std::string& method, int rank, int ranks,
                       const std::string& more = "--init-timeout 2") {
    return "train --data no-such-set --init-method " + method + " --rank " + std::to_string(rank) +
           " --world-size " + std::to_string(ranks) + " " + more;
}

}  // namespace

TEST_CASE("tcp://: any order of start, names and IPv6, and the single rank's losses") {
    Training training;
    training.check(tcp(free_port()), 2, {0, 1});
    training.check(tcp(free_port()), 3, {2, 1, 0});
    training.check(tcp(free_port(), "localhost"), 2, {1, 0});
    training.check(tcp(free_port(), "[::1]"), 2, {1, 0});
}

TEST_CASE("file://: any order of start, and nothing is left behind") {
    Training training;
    const std::string path = training.file("meeting");
    training.check("file://" + path, 3, {2, 0, 1});
    CHECK(!std::filesystem::exists(path));
    training.check("file://" + path, 2, {0, 1});  // so the same path does again
    CHECK(!std::filesystem::exists(path));
}

TEST_CASE("the environments of torchrun, of Slurm, and MASTER_ADDR by hand") {
    Training training;
    // `more`: flags of a rank.
    const auto check = [&](const std::function<std::string(int)>& environment,
                           const std::function<std::string(int)>& more = {}) {
        Jobs jobs;
        for (const int rank : {1, 0}) {
            jobs.start(training.flags + "--epochs 2 --json " + training.file("env.jsonl") +
                           (more ? more(rank) : std::string()),
                       environment(rank));
        }
        training.compare(jobs.wait(), 2, "env.jsonl");
    };
    const std::string master =
        " MASTER_ADDR=localhost MASTER_PORT=" + std::to_string(free_port()) + " ";
    const auto number = [](int rank) { return std::to_string(rank); };
    check([&](int rank) { return "RANK=" + number(rank) + " WORLD_SIZE=2" + master; });
    // Flags count before the environment.
    check([&](int) { return "RANK=7 WORLD_SIZE=9" + master; },
          [&](int rank) { return " --init-method env:// --world-size 2 --rank " + number(rank); });
    check([&](int rank) {
        return "SLURM_PROCID=" + number(rank) +
               " SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=" + number(rank) +
               " SLURM_JOB_ID=" + number(getpid()) +
               " SLURM_STEP_ID=3 SLURM_STEP_NODELIST=localhost,other[1-3] ";
    });
    // torchrun's own store holds MASTER_PORT, and here another program the port after it.
    const Listener agent;
    check([&](int rank) {
        return "RANK=" + number(rank) + " WORLD_SIZE=2 LOCAL_RANK=" + number(rank) +
               " LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + number(agent.port - 1) +
               " TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True ";
    });
}

TEST_CASE("torchrun itself") {
    // Debian 12's (1.13, under Python 3.11) starts nothing at all.
    if (run_shell("timeout -k 1 60 torchrun --no_python --nproc_per_node 1 true").exit_code != 0) {
        WARN("skipped: no torchrun that works on the PATH");
        return;
    }
    Training training;
    Jobs jobs;
    for (const char* mode : {"", "--standalone"}) {
        jobs.start_shell("timeout -k 1 120 torchrun --no_python --nproc_per_node 2 " +
                         std::string(mode) + " " + gyre_command(0, training.flags) +
                         "--epochs 2 --json " + training.file("torchrun.jsonl"));
        training.compare(jobs.wait(), 2, "torchrun.jsonl");
    }
}

TEST_CASE("a rank that does not come is named at the deadline") {
    const std::string method = tcp(free_port());
    Jobs jobs;
    jobs.start(rank_flags(method, 0, 4));
    jobs.start(rank_flags(method, 2, 4));
    for (const Outcome& outcome : jobs.wait()) {
        expect(outcome, 4, {"2 of 4 ranks did not come", method, "missing: ranks 1, 3"});
    }
    // Without rank 0 there is no place to meet.
    expect(run_gyre(0, rank_flags(method, 1, 2)), 4, {"rank 1", method, "missing: rank 0"});
    const TempDir dir;
    const std::string file = "file://" + (dir.path() / "meeting").string();
    jobs.start(rank_flags(file, 0, 2));
    expect(jobs.wait().at(0), 4, {"missing: rank 1", file});
    CHECK(!std::filesystem::exists(dir.path() / "meeting"));
    expect(run_gyre(0, rank_flags(file, 1, 2)), 4, {"missing: rank 0"});
}

TEST_CASE("ranks that do not fit into the job are refused, and the job goes on") {
    Training training;
    const std::string method = tcp(free_port());
    const std::string common = training.flags + "--epochs 2 --init-method " + method + " ";
    Jobs job;
    job.start(common + "--rank 0 --world-size 3 --json " + training.file("ranks.jsonl"));
    job.start(common + "--rank 1 --world-size 3");
    sleep_ms(500);
    expect(run_gyre(0, rank_flags(method, 2, 4)), 4, {"world size '4'", "'3'", method});
    expect(run_gyre(0, rank_flags(method, 1, 3)), 4, {"rank 1 is already at", "--rank"});
    expect(run_gyre(0, rank_flags(method, 2, 3, "--job-id b --init-timeout 2")), 4,
           {"another gyre job", "job id is ''", "'b'"});
    expect(run_gyre(0, rank_flags(method, 0, 3)), 4,
           {"cannot listen", method, "a gyre job already does", "another port"});
    job.start(common + "--rank 2 --world-size 3");
    training.compare(job.wait(), 3, "ranks.jsonl");
}

TEST_CASE("a second job on the port of a running one is refused") {
    Training training;
    const std::string method = tcp(free_port());
    const std::string common = training.flags + "--epochs 100000 --init-method " + method + " ";
    const std::string json = training.file("run.jsonl");
    Jobs job;
    const std::string pid = training.file("pid");
    job.start_shell("timeout --foreground 120 " + gyre_command(0, common) +
                    "--rank 0 --world-size 2 --json " + json + " & echo $! >" + pid + "; wait $!");
    job.start(common + "--rank 1 --world-size 2");
    CHECK(run_shell("for i in $(seq 600); do grep -qs step " + json +
                    " && exit 0; sleep 0.05; done; exit 1")
              .exit_code == 0);
    expect(run_gyre(0, rank_flags(method, 0, 2)), 4, {"a gyre job already does"});
    expect(run_gyre(0, rank_flags(method, 1, 2)), 4, {"rank 1 is already at"});
    run_shell("kill -TERM $(cat " + pid + ")");
    // One rank was told to stop: both do, in order.
    for (const Outcome& outcome : job.wait()) {
        INFO(outcome.output);
        CHECK((outcome.exit_code == 130 || outcome.exit_code == 124));
    }
}

TEST_CASE("a stale file is recognised and refused") {
    const TempDir dir;
    const auto path = dir.path() / "meeting";
    const std::string method = "file://" + path.string();
    // A job that is killed while it waits leaves its folder behind.
    run_shell("timeout -s KILL 1 " + gyre_command(0, rank_flags(method, 0, 2)));
    REQUIRE(std::filesystem::exists(path));
    Jobs jobs;
    jobs.start(rank_flags(method, 1, 2));
    jobs.start(rank_flags(method, 0, 2));
    const auto outcomes = jobs.wait();
    expect(outcomes[0], 4, {"rank 0", "stopped answering", "remove " + path.string()});
    expect(outcomes[1], 4, {"rank 0 is already at", "process ", "remove " + path.string()});
    // One that all its ranks had reached: what they left does not pass for an answer.
    std::filesystem::remove_all(path);
    Jobs killed;
    for (const int rank : {0, 1, 2}) {
        killed.start_shell("timeout -s KILL 1.5 " + gyre_command(0, rank_flags(method, rank, 4)));
    }
    killed.wait();
    expect(run_gyre(0, rank_flags(method, 2, 4)), 4, {"rank 2 is already at"});
}

TEST_CASE("what is not gyre, or cannot be listened on, is told apart") {
    const Listener silent;  // accepts and never says a word
    const std::string method = tcp(silent.port);
    expect(run_gyre(0, rank_flags(method, 1, 2)), 4, {"not gyre", method});
    expect(run_gyre(0, rank_flags(method, 0, 2)), 4, {"cannot listen", "not gyre"});
    expect(run_gyre(0, rank_flags(tcp(free_port(), "198.51.100.7"), 0, 2)), 4,
           {"cannot listen on 198.51.100.7", "address of this host"});
    expect(run_gyre(0, rank_flags(tcp(free_port(), "no.such.host.invalid"), 1, 2)), 4,
           {"no.such.host.invalid", "not found"});
}

TEST_CASE("flags that do not say enough, or contradict each other, are usage errors") {
    const auto refuse = [](const std::string& flags, std::initializer_list<std::string> parts) {
        INFO(flags);
        expect(run_gyre(0, "train --data no-such-set " + flags), 2, parts);
    };
    refuse("--init-method tcp://localhost:4000", {"--rank", "--world-size"});
    refuse("--init-method tcp://localhost:4000 --rank 2 --world-size 2", {"rank 2 of 2"});
    refuse("--init-method tcp://localhost --rank 0 --world-size 2", {"tcp://192.0.2.1:22225"});
    refuse("--init-method tcp://::1:4000 --rank 0 --world-size 2", {"brackets"});
    refuse("--init-method tcp://localhost:port --rank 0 --world-size 2", {"'port' is no port"});
    refuse("--init-method file://job --rank 0 --world-size 2", {"full path"});
    refuse("--init-method udp://localhost:4000", {"--init-method", "udp"});
    refuse("--comm mpi --init-method tcp://localhost:4000", {"--comm mpi"});
    refuse("--comm mpi --rank 0 --world-size 2", {"--rank", "MPI"});
    refuse("--comm carrier-pigeon", {"carrier-pigeon"});
    // A launcher's variables that say too little: never a rank that trains alone without a word.
    const auto refuse_environment = [](const std::string& environment,
                                       std::initializer_list<std::string> parts) {
        INFO(environment);
        const std::string all = environment + " MASTER_ADDR=127.0.0.1 ";
        expect(run_shell(all + gyre_command(0, "train --data no-such-set")), 4, parts);
    };
    refuse_environment("RANK=1", {"RANK is '1', WORLD_SIZE is not set", "--world-size", "unset"});
    refuse_environment("RANK=0 WORLD_SIZE=two", {"WORLD_SIZE is 'two'"});
    refuse_environment("RANK=0 WORLD_SIZE=0", {"WORLD_SIZE is '0'"});
    refuse_environment("RANK=2 WORLD_SIZE=1", {"RANK is '2', WORLD_SIZE is '1'"});
    refuse_environment("RANK=one WORLD_SIZE=2", {"RANK is 'one'"});
    const std::string torchrun =
        "TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True RANK=0 ";
    refuse_environment(torchrun + "MASTER_PORT=4000", {"torchrun", "WORLD_SIZE is not set"});
    refuse_environment(torchrun + "WORLD_SIZE=2 MASTER_PORT=65535",
                       {"MASTER_PORT 65535", "--master-port"});
    // Said even where the ranks cannot meet.
    expect(run_shell("RANK=0 WORLD_SIZE=2 " + gyre_command(0, "train --lr x")), 2, {"--lr"});
}

TEST_CASE("a killed rank ends the others with an error, within seconds") {
    Training training;
    for (const int ranks : {2, 3}) {
        const std::string common = training.flags + "--epochs 100000 --init-method " +
                                   tcp(free_port()) + " --world-size " + std::to_string(ranks) +
                                   " --rank ";
        Jobs jobs;
        for (int rank = 0; rank + 1 < ranks; ++rank) {
            jobs.start(common + std::to_string(rank));
        }
        const auto start = std::chrono::steady_clock::now();
        run_shell("timeout -s KILL 3 " + gyre_command(0, common + std::to_string(ranks - 1)));
        // Each says it on its own terminal, and which rank it was: not who noticed it first.
        for (const Outcome& outcome : jobs.wait()) {
            expect(outcome, 4, {"its process has ended"});
            const auto named = [&](int rank) {
                return count_of(outcome.output, "rank " + std::to_string(rank) + " on " +
                                                    gyre::host_name() + " (its process");
            };
            CHECK(named(ranks - 1) == 1);
            CHECK(named(0) + (ranks > 2 ? named(1) : 0) == 0);
        }
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        CHECK(seconds.count() < 20.0);
    }
}

TEST_CASE("ranks that differ say so on each terminal") {
    Training training;
    const std::string common =
        training.flags + "--init-method " + tcp(free_port()) + " --world-size 2 ";
    Jobs jobs;
    jobs.start(common + "--rank 0 --momentum 0.25");
    jobs.start(common + "--rank 1 --momentum 0.75");
    for (const Outcome& outcome : jobs.wait()) {
        expect(outcome, 4, {"flag --momentum differs", "0.75"});
    }
}

TEST_CASE("a frame's length is believed only up to a limit") {
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    const gyre::comm::Socket here(ends[0]), there(ends[1]);
    REQUIRE(there.send_all(gyre::comm::frame("abc") + std::string("\x10\0\0\0", 4)));  // 256 MiB
    CHECK(here.receive_frame(3).value_or("") == "abc");
    const auto peak_kib = [] {
        std::ifstream status("/proc/self/status");
        for (std::string line; std::getline(status, line);) {
            if (line.starts_with("VmHWM:")) {
                return std::stol(line.substr(6));
            }
        }
        return 0L;
    };
    const long before = peak_kib();
    CHECK(!here.receive_frame(1 << 20));
    CHECK(peak_kib() - before < 100'000);
}

TEST_CASE("strangers at the meeting: no more than a meeting needs is kept") {
    const int port = free_port();
    Jobs jobs;
    jobs.start(rank_flags(tcp(port), 0, 3, "--init-timeout 4"));
    Stranger first(port);
    CHECK(first.send("\xff\xff\xff\xff rubbish"));
    CHECK(first.closed());
    Stranger large(port);
    CHECK(large.set("large", std::string(1 << 20, 'x')) == "closed");
    Stranger many(port);
    std::size_t taken = 0;
    while (taken < (16 << 20) && many.set(std::to_string(taken), std::string(4000, 'x')) == "1") {
        taken += 4000;
    }
    CHECK(taken < (2 << 20));
    for (int i = 0; i < 4000 && many.set("small" + std::to_string(i), "x") == "1"; ++i) {
    }
    // Nor more connections: the oldest goes.
    std::vector<std::unique_ptr<Stranger>> crowd;
    for (int i = 0; i < 70; ++i) {
        crowd.push_back(std::make_unique<Stranger>(port));
    }
    CHECK(crowd.front()->closed());
    expect(run_gyre(0, rank_flags(tcp(port), 1, 3)), 4, {"the meeting at", "is full"});
    expect(jobs.wait().at(0), 4, {"missing: ranks 1, 2"});
}

TEST_CASE("a stranger that comes as a rank ends the job with a message, which is only text") {
    const int port = free_port();
    Jobs jobs;
    jobs.start(rank_flags(tcp(port), 0, 2, "--init-timeout 20"));
    const auto start = std::chrono::steady_clock::now();
    Stranger(port).join(1, "\x1b]0;owned\x07\xc2\x9b");
    const Outcome outcome = jobs.wait().at(0);
    expect(outcome, 4, {"rank 1 on \\x1b]0;owned\\x07\\xc2\\x9b has ended during the start"});
    CHECK(outcome.output.find('\x1b') == std::string::npos);
    CHECK(outcome.output.find('\x9b') == std::string::npos);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    CHECK(seconds.count() < 10.0);
}

TEST_CASE("a rank that hangs while Gloo connects ends the start soon after its time") {
    const int port = free_port();
    Jobs jobs;
    jobs.start(rank_flags(tcp(port, "127.0.0.2"), 0, 2, "--init-timeout 1 --timeout 20"));
    // Rank 0 has the higher address, and so connects to the stranger, which never answers.
    const Listener silent;
    Stranger stranger(port, 2);
    stranger.join(1, "b");
    for (const char* context : {"control", "gradients"}) {
        stranger.say_address(context, 1, INADDR_LOOPBACK, silent.port);
    }
    const Outcome outcome = jobs.wait().at(0);
    expect(outcome, 4, {"--init-timeout", "rank 1 on b has been silent for"});
    CHECK(outcome.seconds < 12.0);
}

TEST_CASE("a killed rank 0 does not leave the others waiting while Gloo connects") {
    const TempDir dir;
    const int port = free_port();
    const std::string pid = (dir.path() / "pid").string();
    Jobs jobs;
    jobs.start_shell(gyre_command(0, rank_flags(tcp(port), 0, 3, "--init-timeout 20")) +
                     " & echo $! >" + pid + "; wait $!");
    jobs.start(rank_flags(tcp(port), 1, 3, "--init-timeout 20"));
    // Has the higher address, and so is waited for.
    Stranger stranger(port);
    stranger.join(2, "b");
    stranger.say_address("control", 2, 0x7ffffffeU, 1);
    stranger.get("control/1");
    sleep_ms(300);
    const auto start = std::chrono::steady_clock::now();
    run_shell("kill -KILL $(cat " + pid + ")");
    expect(jobs.wait().at(1), 4, {"rank 0", "its process has ended"});
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    CHECK(seconds.count() < 5.0);
}
