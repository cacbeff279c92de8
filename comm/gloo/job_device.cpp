#include "comm/gloo/job_device.hpp"

#include <gloo/transport/tcp/device.h>

// Later versions of Gloo have one listener per device, which reads from each connection what pair
// it is for, and drops the others.
#if __has_include(<gloo/transport/tcp/listener.h>)

namespace gyre::comm {

std::shared_ptr<gloo::transport::Device> make_job_device(const gloo::transport::tcp::attr& address,
                                                         const std::string& /*token*/) {
    return gloo::transport::tcp::CreateDevice(address);
}

}  // namespace gyre::comm

#else

#include <fcntl.h>
#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/pair.h>

#include <mutex>
#include <vector>

#include "comm/launch/socket.hpp"

namespace gyre::comm {
namespace {

namespace tcp = gloo::transport::tcp;

// Limits of one listener: connections waiting to be accepted, and those without the token so far.
constexpr std::size_t kBacklog = 64, kMostCallers = 16;

// A rank's end of the connection to another. Both listen at first; the one with the higher address
// then connects to the other. Gloo's thread calls handleEvents().
class JobPair final : public tcp::Pair {
 public:
    JobPair(tcp::Context* context, tcp::Device* device, int rank, std::chrono::milliseconds timeout,
            std::string token)
        : Pair(context, device, rank, timeout), token_(std::move(token)) {
        const std::lock_guard lock(m_);
        usable_ = state_ == LISTENING && ::listen(fd_, kBacklog) == 0 &&
                  fcntl(fd_, F_SETFL, O_NONBLOCK) == 0;
    }
    ~JobPair() override {
        const std::lock_guard lock(m_);
        callers_.clear();
        if (state_ != CLOSED) {
            Pair::changeState(CLOSED);  // before Gloo's thread would find half an object
        }
    }
    JobPair(const JobPair&) = delete;
    JobPair& operator=(const JobPair&) = delete;

    // False if somebody has connected while this was no more than Gloo's pair.
    bool usable() const { return usable_; }

    void connect(const std::vector<char>& peer) override {
        Pair::connect(peer);
        const std::lock_guard lock(m_);
        if (is_client_ && state_ == CONNECTED) {
            // If the connection is gone already, its first use says so.
            ::send(fd_, token_.data(), token_.size(), MSG_NOSIGNAL);
        }
    }

    void handleEvents(int events) override {
        const std::unique_lock lock(m_, std::try_to_lock);
        if (!lock) {
            return;  // as in Gloo's: it calls again
        }
        if (state_ == LISTENING) {
            listen_to_callers();
        } else if (!callers_.empty()) {
            callers_.clear();  // of the listener that was closed; the event may be theirs
        } else if (state_ == CONNECTING) {
            handleConnecting();
        } else if (state_ == CONNECTED) {
            handleReadWrite(events);
        }
    }

 private:
    struct Caller {
        Socket socket;
        std::string said{};
    };

    void listen_to_callers() {
        while (callers_.size() < kMostCallers + kBacklog) {
            Socket socket(accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
            if (!socket.open()) {
                break;
            }
            device_->registerDescriptor(socket.fd(), EPOLLIN, this);
            callers_.push_back({std::move(socket)});
        }
        for (Caller& caller : callers_) {
            if (hear(caller)) {
                admit(std::move(caller.socket));
                return;
            }
        }
        std::erase_if(callers_, [](const Caller& caller) { return !caller.socket.open(); });
        if (callers_.size() > kMostCallers) {  // the oldest go
            callers_.erase(callers_.begin(), callers_.end() - kMostCallers);
        }
    }
    // Returns whether the caller has said the token; closes the connection if it says anything
    // else.
    bool hear(Caller& caller) const {
        std::string part(token_.size() - caller.said.size(), '\0');
        const ssize_t bytes = ::recv(caller.socket.fd(), part.data(), part.size(), 0);
        if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) {
            return false;
        }
        caller.said.append(part, 0, bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
        if (bytes <= 0 || !token_.starts_with(caller.said)) {
            caller.socket.close();
            return false;
        }
        return caller.said == token_;
    }
    // Makes the caller this pair's connection, as Gloo does with the first that connects.
    void admit(Socket socket) {
        callers_.clear();
        device_->unregisterDescriptor(fd_, this);
        ::close(fd_);
        fd_ = socket.release();
        handleConnected();
    }

    const std::string token_;
    bool usable_ = false;
    std::vector<Caller> callers_;  // guarded by Gloo's m_
};

class JobContext final : public tcp::Context {
 public:
    JobContext(std::shared_ptr<tcp::Device> device, int own_rank, int ranks, std::string token)
        : Context(std::move(device), own_rank, ranks), token_(std::move(token)) {}
    std::unique_ptr<gloo::transport::Pair>& createPair(int peer) override {
        auto& place = pairs_.at(static_cast<std::size_t>(peer));
        std::unique_ptr<JobPair> pair;
        do {
            pair = std::make_unique<JobPair>(this, device_.get(), peer, getTimeout(), token_);
        } while (!pair->usable());
        return place = std::move(pair);
    }

 private:
    const std::string token_;
};

class JobDevice final : public tcp::Device {
 public:
    JobDevice(const tcp::attr& address, const std::string& token)
        : Device(tcp::CreateDeviceAttr(address)), token_("gyre " + token + "\n") {}
    std::shared_ptr<gloo::transport::Context> createContext(int rank, int size) override {
        return std::make_shared<JobContext>(shared_from_this(), rank, size, token_);
    }

 private:
    const std::string token_;
};

}  // namespace

std::shared_ptr<gloo::transport::Device> make_job_device(const tcp::attr& address,
                                                         const std::string& token) {
    return std::make_shared<JobDevice>(address, token);
}

}  // namespace gyre::comm

#endif
