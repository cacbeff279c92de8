#include "tests/fuzz/targets.hpp"

#include <lzma.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <zlib.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>

#include "base/error.hpp"
#include "base/printable.hpp"
#include "comm/launch/tcp_server.hpp"
#include "comm/watch/link.hpp"
#include "comm/watch/peers.hpp"
#include "data/formats.hpp"
#include "data/idx.hpp"
#include "data/image_cache.hpp"
#include "data/picture.hpp"
#include "model/graph.hpp"
#include "model/safetensors.hpp"
#include "model/spec.hpp"
#include "tests/data/picture_files.hpp"
#include "tests/support/small_dataset.hpp"
#include "tests/support/temp_dir.hpp"
#include "train/checkpoint.hpp"
#include "train/cli/config.hpp"
#include "train/cli/flags.hpp"
#include "train/cli/options.hpp"
#include "train/receipt.hpp"

namespace gyre::test {
namespace {

namespace fs = std::filesystem;

const TempDir& folder() {
    static const TempDir dir;
    return dir;
}

std::string bytes_of_file(const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

// The path of a file with these bytes.
std::string file_of(const std::string& bytes, const std::string& name = "input") {
    const std::string path = folder().file(name);
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
}

// --- data sets ----------------------------------------------------------------------------------

std::string gzip(const std::string& data) {
    z_stream stream{};
    deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY);
    std::string out(deflateBound(&stream, static_cast<uLong>(data.size())) + 64, '\0');
    stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(data.data()));
    stream.avail_in = static_cast<uInt>(data.size());
    stream.next_out = reinterpret_cast<Bytef*>(out.data());
    stream.avail_out = static_cast<uInt>(out.size());
    deflate(&stream, Z_FINISH);
    out.resize(stream.total_out);
    deflateEnd(&stream);
    return out;
}

std::string xz(const std::string& data) {
    std::string out(lzma_stream_buffer_bound(data.size()), '\0');
    std::size_t bytes = 0;
    static_cast<void>(lzma_easy_buffer_encode(
        0, LZMA_CHECK_NONE, nullptr, reinterpret_cast<const std::uint8_t*>(data.data()),
        data.size(), reinterpret_cast<std::uint8_t*>(out.data()), &bytes, out.size()));
    out.resize(bytes);
    return out;
}

std::vector<std::string> idx_seeds() {
    std::vector<std::string> seeds;
    for (const IdxArray& array : {images_of({2, 3, 4}), labels_of({0, 1, 2}),
                                  array_of<std::int16_t>(IdxType::i16, {2, 2}, {1, -1, 300, 7}),
                                  array_of<double>(IdxType::f64, {3}, {0.5, -1.0, 1e300})}) {
        write_idx(folder().file("seed"), array);
        seeds.push_back(bytes_of_file(folder().file("seed")));
        seeds.push_back(gzip(seeds.back()));
        seeds.push_back(xz(seeds[seeds.size() - 2]));
    }
    return seeds;
}

void read_an_idx(const std::string& input) {
    data::read_idx(file_of(input));
}

std::string npy(const std::string& type, const std::string& shape, const std::string& elems) {
    std::string header =
        "{'descr': '" + type + "', 'fortran_order': False, 'shape': " + shape + ", }";
    header.resize((header.size() + 10 + 64) / 64 * 64 - 11, ' ');
    header += '\n';
    std::string file = "\x93NUMPY";
    file += {'\1', '\0', static_cast<char>(header.size() & 0xff),
             static_cast<char>(header.size() >> 8)};
    return file + header + elems;
}

std::vector<std::string> npy_seeds() {
    return {npy("|u1", "(4, 2, 3, 3)", std::string(72, 'p')),
            npy("|u1", "(4, 2, 3)", std::string(24, 'p'))};
}

void read_npy_images(const std::string& input) {
    data::DatasetFiles files{.format = data::Format::npy,
                             .name = "set",
                             .directory = folder().path(),
                             .train_images = file_of(input),
                             .train_labels = file_of(npy("|u1", "(4,)", {0, 1, 2, 1}), "labels"),
                             .test_images = file_of(input, "more"),
                             .test_labels = folder().file("labels")};
    data::load_npy(files, std::nullopt);
}

std::vector<std::string> npy_label_seeds() {
    return {npy("|u1", "(4,)", {0, 1, 2, 1}),
            npy("<i4", "(4, 1)", std::string("\2\0\0\0\0\0\0\0\1\0\0\0\1\0\0\0", 16))};
}

void read_npy_labels(const std::string& input) {
    const std::string images = npy("|u1", "(4, 2, 3)", std::string(24, 'p'));
    data::DatasetFiles files{.format = data::Format::npy,
                             .name = "set",
                             .directory = folder().path(),
                             .train_images = file_of(images, "images"),
                             .train_labels = file_of(input),
                             .test_images = folder().file("images"),
                             .test_labels = folder().file("input")};
    data::load_npy(files, std::nullopt);
}

std::vector<std::string> cifar_seeds() {
    std::string rows;
    for (int row = 0; row < 2; ++row) {
        rows += static_cast<char>(row);
        rows += std::string(3072, 'p');
    }
    return {rows};
}

void read_cifar(const std::string& input) {
    const fs::path set = folder().path() / "cifar";
    fs::create_directories(set);
    for (int i = 1; i <= 5; ++i) {
        file_of(input, "cifar/data_batch_" + std::to_string(i) + ".bin");
    }
    file_of(cifar_seeds().front(), "cifar/test_batch.bin");
    data::load_cifar({.format = data::Format::cifar10,
                      .name = "cifar",
                      .directory = set,
                      .train_images = {},
                      .train_labels = {},
                      .test_images = {},
                      .test_labels = {}});
}

std::vector<std::string> picture_seeds() {
    std::vector<std::string> seeds;
    for (const int channels : {1, 3}) {
#if GYRE_HAVE_PNG
        write_png(folder().file("seed.png"), channels, 2, 3, counted(channels * 6));
        seeds.push_back(bytes_of_file(folder().file("seed.png")));
#endif
#if GYRE_HAVE_JPEG
        write_jpeg(folder().file("seed.jpg"), channels, 2, 3, 80);
        seeds.push_back(bytes_of_file(folder().file("seed.jpg")));
#endif
    }
#if GYRE_HAVE_WEBP
    write_webp(folder().file("seed.webp"), 2, 3, counted(18));
    seeds.push_back(bytes_of_file(folder().file("seed.webp")));
#endif
    return seeds;
}

void read_picture(const std::string& input) {
    data::decode_picture({file_of(input)}, input.size() % 2 == 0);
}

// The file of a cache, in which 3 images of 1 x 2 x 2 are looked for.
data::DecodedImages load_cached(bool may_decode) {
    setenv("XDG_CACHE_HOME", folder().path().c_str(), 1);
    data::ImageCache cache("fuzz.images", 7, {});
    return cache.load({.images = 3,
                       .shape =
                           [] {
                               return data::DecodedImages{1, 2, 2, {}};
                           },
                       .decode =
                           [may_decode](const data::DecodedImages&, std::uint8_t* pixels,
                                        const data::ImageCache::Progress&) {
                               std::fill_n(pixels, 12, std::uint8_t{9});
                               if (!may_decode) {  // what is there was refused
                                   throw input_error("decoded again");
                               }
                               return true;
                           }});
}

fs::path cached_file() {
    for (const auto& entry : fs::recursive_directory_iterator(folder().path())) {
        if (entry.path().extension() == ".images") {
            return entry.path();
        }
    }
    std::abort();
}

std::vector<std::string> cache_seeds() {
    load_cached(true);
    return {bytes_of_file(cached_file())};
}

void read_cache(const std::string& input) {
    static const fs::path path = [] {
        load_cached(true);
        return cached_file();
    }();
    fs::remove(path);
    std::ofstream(path, std::ios::binary) << input;
    const data::DecodedImages images = load_cached(false);
    int sum = 0;
    for (const std::uint8_t pixel : images.pixels) {
        sum += pixel;
    }
    if (images.pixels.size() != 12 || sum < 0) {
        std::abort();
    }
}

// --- nets, weights, checkpoints, settings -------------------------------------------------------

std::vector<std::string> safetensors_seeds() {
    const auto of = [](const std::string& header, std::size_t bytes) {
        std::string file;
        for (int shift = 0; shift < 64; shift += 8) {
            file += static_cast<char>(header.size() >> shift & 0xff);
        }
        return file + header + std::string(bytes, 'w');
    };
    return {of(R"({"fc1.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
               R"("fc1.bias":{"dtype":"F16","shape":[2],"data_offsets":[24,28]},)"
               R"("__metadata__":{"gyre.model":"linear classes\n","gyre.shape":"1x1x3"}})",
               28),
            of(R"({"a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}})", 2)};
}

void read_weights_file(const std::string& input) {
    train::read_weights(file_of(input, "input.safetensors"));
}

std::vector<std::string> identity_seeds() {
    return {R"({"schema":2,"flags":{"lr":"0.1","epochs":"3"},"facts":{"ranks":"2","model":"x"}})",
            R"({"lr":"0.1"})"};
}

void read_identity(const std::string& input) {
    try {
        train::parse_identity(input);
    } catch (const std::exception& error) {  // as its reader takes any
        throw input_error(error.what());
    }
}

std::vector<std::string> receipt_seeds() {
    const std::string start = R"({"event":"start","receipt":2,"version":"x","settings":{"lr":"1"},)"
                              R"("identity":{"schema":2,"flags":{},"facts":{"ranks":"2"}}})"
                              "\n";
    return {start + R"({"event":"state","step":4,"hash":"00"})"
                    "\n"};
}

void read_receipt(const std::string& input) {
    train::parse_receipt(input, "fuzz");
}

std::vector<std::string> model_seeds() {
    return {
        "conv 4 k3 s2 p1 g1 nobias\nbatchnorm eps 1e-3 momentum 0.1\nrelu6\nas x\nconv 4 k3 p1 g4\n"
        "add x\navgpool global\nlinear classes\nlog-softmax\n",
        "maxpool 2 s1 p1\nas a\nfrom a\nconcat a\nleaky_relu 0.1\ndropout 0.5\nlinear "
        "7\nhardswish\n"
        "linear classes\n",
        "conv 6 k1\nas x\navgpool global\nconv 6 k1\nsigmoid\nmul x\nflatten\nlinear classes\n",
        "conv 6 k1\ngroupnorm 2 eps 0.001\nshuffle 3\nchunk 2/3\nmaxpool 3 s2 ceil\nconv classes "
        "k1\navgpool global\n"};
}

void read_model(const std::string& input) {
    model::build_graph(model::parse_model(input, "fuzz"), {3, 32, 32}, 10, true);
}

std::vector<std::string> config_seeds() {
    return {"lr = 0.1\nepochs = 3\n", "# a comment\noptimizer = \"adam\"\nno-shuffle = true\n",
            "augment = [\"shift2\", \"hflip\"]\nbetas = [0.9, 0.99]\n"};
}

void read_config(const std::string& input) {
    static train::RunSpec spec;
    static const std::unique_ptr<CLI::App> app = [] {
        auto made = std::make_unique<CLI::App>("fuzz", "gyre");
        train::add_flags(*made->add_subcommand("train", ""), train::train_flags(spec));
        return made;
    }();
    train::with_config(*app, {"train", "--config", file_of(input, "input.toml")});
}

// --- the meeting --------------------------------------------------------------------------------

// Requests, each after a byte with its length.
std::vector<std::string> meeting_seeds() {
    const std::string set =
                          std::string("Srank/1") + '\0' + "0.9.0\n2\n\nhost\nmachine\n1\nn\nt\nx\n",
                      find = "Frank/1", silent = "Fsilent";
    std::string all;
    for (const std::string& request : {set, find, silent}) {
        all += static_cast<char>(request.size()) + request;
    }
    return {all};
}

// A server for some inputs, and how to reach it.
struct Meeting {
    sockaddr_in address{};
    comm::StartUp start_up;
    std::optional<comm::TcpServer> server;
    Meeting() {
        start_up.world_size = 2;
        comm::Socket listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t length = sizeof address;
        auto* const plain = reinterpret_cast<sockaddr*>(&address);
        if (bind(listener.fd(), plain, length) != 0 || listen(listener.fd(), 8) != 0 ||
            getsockname(listener.fd(), plain, &length) != 0) {
            std::abort();
        }
        server.emplace(std::move(listener), start_up);
    }
};

void say_at_meeting(const std::string& input) {
    // OpenSSL first, so that it cleans up at exit after the server's thread, which uses it, has
    // ended.
    [[maybe_unused]] static const comm::Seal first = comm::store_seal({}, "", "", false);
    static std::unique_ptr<Meeting> meeting;
    static int inputs = 0;
    if (inputs++ % 200 == 0) {
        meeting.reset();  // before the next one
        meeting = std::make_unique<Meeting>();
    }
    comm::Socket socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    socket.set_timeouts(std::chrono::seconds(60));
    const std::string nonce(comm::kNonceBytes, 'n');
    std::string theirs(comm::kGreeting.size() + comm::kNonceBytes, '\0');
    int failed = 0;
    do {  // libFuzzer's alarm interrupts it; Linux completes the connection in the next call
        failed = connect(socket.fd(), reinterpret_cast<sockaddr*>(&meeting->address),
                         sizeof meeting->address);
    } while (failed != 0 && errno == EINTR);
    if (failed != 0 || !socket.send_all(std::string(comm::kGreeting) + nonce) ||
        !socket.receive_all(theirs.data(), theirs.size())) {
        std::perror("the meeting takes no connection");
        std::abort();
    }
    comm::Seal seal = comm::store_seal({}, theirs.substr(comm::kGreeting.size()), nonce, false);
    const auto job = socket.receive_frame(1 << 12);
    if (!job || !seal.open(*job)) {
        std::abort();
    }
    for (std::size_t at = 0; at < input.size();) {
        const std::size_t bytes = static_cast<unsigned char>(input[at]);
        const std::string request = input.substr(at + 1, bytes);
        at += 1 + bytes;
        const auto reply = socket.send_all(comm::frame(seal.close(request)))
                               ? socket.receive_frame(1 << 20)
                               : std::nullopt;
        if (!reply || !seal.open(*reply)) {
            std::abort();  // whatever is asked, there is an answer
        }
    }
}

// A store in which the other ranks have published this value under every key.
class SaidStore final : public comm::Store {
 public:
    explicit SaidStore(std::string value) : value_(std::move(value)) { deadline = Clock::now(); }
    bool set(const std::string&, const std::string&) override { return true; }
    std::optional<std::string> find(const std::string& key) override {
        if (key != "all") {
            return value_;
        }
        std::istringstream lines(value_);  // of which the seventh is what rank 0 answers with
        std::string nonce;
        for (int line = 0; line < 7; ++line) {
            nonce.clear();
            std::getline(lines, nonce);
        }
        nonce = comm::printable(nonce) + ' ';
        return nonce + nonce;
    }
    std::string where() const override { return "here"; }
    std::string remedy() const override { return "none"; }

 private:
    const std::string value_;
};

std::vector<std::string> facts_seeds() {
    return {std::string(GYRE_VERSION) +
            "\n2\n\nhost\nhost/boot\n17\n0123\n2026-01-01 00:00:00\n"
            "pid:[1]\n"};
}

void read_facts(const std::string& input) {
    SaidStore store(input);
    comm::StartUp start_up;
    start_up.rank = 1;
    start_up.world_size = 2;
    comm::meet(store, start_up);
}

// --- the watchdog -------------------------------------------------------------------------------

comm::Seal watchdog_seal(bool root) {
    return {comm::Secret(std::string(comm::Secret::kBytes, 's')), "watchdog", root};
}

// A rank's messages: its greeting, and its status twice.
std::vector<std::string> watchdog_seeds() {
    comm::Seal seal = watchdog_seal(false);
    const std::string status(sizeof(comm::Status), '\1');
    std::string sent = seal.close(status);
    sent += seal.close(status);
    return {sent, sent + seal.close(status)};
}

void read_watchdog(const std::string& input) {
    int ends[2] = {};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
        std::abort();
    }
    comm::Link link(comm::Socket(ends[0]), watchdog_seal(true));
    int messages = 0;
    {
        const comm::Socket stranger(ends[1]);
        for (std::size_t at = 0; at < input.size(); at += 1000) {  // read while it arrives
            if (!stranger.send_all(std::string_view(input).substr(at, 1000))) {
                std::abort();
            }
            comm::Status status;
            while (link.receive(&status, sizeof status)) {
                ++messages;
            }
        }
    }
    if (messages == 0) {
        throw input_error("nothing was taken");
    }
}

}  // namespace

const std::vector<Target>& targets() {
    static const std::vector<Target> all = {
        {"idx", idx_seeds, read_an_idx},
        {"npy-images", npy_seeds, read_npy_images},
        {"npy-labels", npy_label_seeds, read_npy_labels},
        {"cifar", cifar_seeds, read_cifar},
        {"picture", picture_seeds, read_picture},
        {"image-cache", cache_seeds, read_cache},
        {"safetensors", safetensors_seeds, read_weights_file},
        {"identity", identity_seeds, read_identity},
        {"receipt", receipt_seeds, read_receipt},
        {"model", model_seeds, read_model},
        {"config", config_seeds, read_config},
        {"meeting", meeting_seeds, say_at_meeting},
        {"facts", facts_seeds, read_facts},
        {"watchdog", watchdog_seeds, read_watchdog},
    };
    return all;
}

const Target& target(const std::string& name) {
    for (const Target& each : targets()) {
        if (each.name == name) {
            return each;
        }
    }
    std::fprintf(stderr, "fuzzing: there is no target '%s'\n", name.c_str());
    std::exit(2);
}

bool run(const Target& target, const std::string& input) {
    try {
        target.read(input);
        return true;
    } catch (const Error& error) {
        if (error.code() == ExitCode::internal) {
            std::fprintf(stderr, "%s: an internal error: %s\n", target.name, error.what());
            std::abort();
        }
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s: no Error, but: %s\n", target.name, error.what());
        std::abort();
    }
    return false;
}

}  // namespace gyre::test
