// The store of keys and values that rank 0 serves to the others over TCP.
//
// Both sides first send a line that says that this is gyre, and a random number; then rank 0 sends
// the job's id, and answers what the client asks, frame by frame. From the job's id on, each
// frame's bytes are a sealed message (comm/launch/secret.hpp), for which both numbers tell the
// connection from others.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "comm/launch/rendezvous.hpp"
#include "comm/launch/secret.hpp"
#include "comm/launch/socket.hpp"

namespace gyre::comm {

constexpr std::string_view kGreeting = "gyre rendezvous 2\n";
constexpr std::size_t kNonceBytes = 16;  // of each side's random number

// Seals one side's frames, once it knows both numbers.
inline Seal store_seal(const Secret& secret, const std::string& of_server,
                       const std::string& of_client, bool server) {
    return {secret, "store " + of_server + of_client, server};
}

class TcpServer {
 public:
    // Serves by a thread of its own, until it is destroyed.
    TcpServer(Socket listener, const StartUp& start_up);
    ~TcpServer();

    // Returns '1', or '0' if the key was there already, or '2' if no more is taken.
    char set(const std::string& key, const std::string& value);
    std::optional<std::string> find(const std::string& key);

 private:
    struct Client {
        Socket socket;
        std::string address;
        std::string nonce;   // rank 0's for this connection
        std::string unsent;  // nothing more is read until it has been taken
        std::string received = {};
        std::optional<Seal> seal = {};  // once the client has begun as gyre does
        bool forged = false;            // a frame was not made by one who knows the secret
        std::string name = {};          // "3 on b", once it has come as this rank
    };

    void serve();
    void take_in(std::vector<Client>& clients);
    void limit_strangers(std::vector<Client>& clients);
    void gone(const Client& client, const std::vector<Client>& others);
    void warn(const Client& client);
    // Returns false if the client has gone, is not gyre, or does not know the secret.
    bool answer(Client& client);
    bool receive_from(Client& client);
    std::string handle(Client& client, const std::string& request);
    void note(const Client& client);
    std::string silent() const;
    bool is_started(const std::string& name) const;

    Socket listener_, wake_;
    int dropped_ = 0;  // connections of strangers
    const std::string member_, job_id_;
    const Secret secret_;
    const StoreLimits limits_;
    std::mutex mutex_;  // guards what follows
    std::map<std::string, std::string> values_;
    std::size_t held_ = 0;
    std::map<std::string, Clock::time_point> heard_;  // by name
    std::thread thread_;
};

}  // namespace gyre::comm
