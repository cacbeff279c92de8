#include "model/safetensors.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cfloat>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <thread>

#include "kernels/base/data_type.hpp"
#include "kernels/base/error.hpp"

namespace gyre::model {
namespace {

static_assert(std::endian::native == std::endian::little,
              "the file format and these readers are little-endian");

constexpr std::uint64_t kMostHeaderBytes = 100'000'000;  // the format's own limit

[[noreturn]] void fail(const std::filesystem::path& path, const std::string& what) {
    throw input_error(
        fmt::format("{}: {}; expected a safetensors file of F32, F16, BF16 or F64 tensors",
                    path.string(), what));
}

// What torch.save or pickle write is told from a safetensors file by its first bytes: a zip file's,
// or a pickle's of protocol 2 to 5, and no JSON after 8 bytes.
void refuse_pickle(const std::filesystem::path& path, std::ifstream& in) {
    std::array<char, 9> first{};
    in.read(first.data(), first.size());
    in.clear();
    in.seekg(0);
    const std::string_view bytes(first.data(), first.size());
    const bool zip = bytes.starts_with("PK\x03\x04");
    const bool pickle = bytes[0] == '\x80' && bytes[1] >= 2 && bytes[1] <= 5;
    if (bytes[8] == '{' || !(zip || pickle)) {
        return;
    }
    const auto python = [](const std::filesystem::path& file) {  // as a string literal
        return nlohmann::json(file.string())
            .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    };
    // The older format of torch.save begins with a number of its own.
    const bool torch = zip || bytes == "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9";
    const std::string load = torch
                                 ? fmt::format("torch.load({}, map_location=\"cpu\")", python(path))
                                 : fmt::format("pickle.load(open({}, \"rb\"))", python(path));
    throw input_error(fmt::format(
        "{}: this is a {}, but gyre reads safetensors. Convert the state_dict in it with Python:\n"
        "  import {}, safetensors.torch as st\n"
        "  st.save_file({{k: v.contiguous() for k, v in {}.items()}}, {})",
        path.string(), torch ? "file of torch.save" : "pickle", torch ? "torch" : "pickle", load,
        python(std::filesystem::path(path).replace_extension(".safetensors"))));
}

// How many bytes an element has; 0 for what is not read.
std::size_t element_bytes(std::string_view dtype) {
    return dtype == "F32" ? 4 : dtype == "F16" || dtype == "BF16" ? 2 : dtype == "F64" ? 8 : 0;
}

template <class Stored, class Convert>
void convert(const std::vector<char>& raw, std::vector<float>& values, Convert to_float) {
    for (std::size_t i = 0; i < values.size(); ++i) {
        Stored stored;
        std::memcpy(&stored, raw.data() + i * sizeof stored, sizeof stored);
        values[i] = to_float(stored);
    }
}

// The tensor of one entry of the header. data_begin, data_bytes: where the file's tensors are.
// Throws input_error where the entry does not fit them, and JSON's exceptions where it lacks
// something.
HostTensor read_tensor(const std::filesystem::path& path, std::ifstream& in,
                       const std::string& name, const nlohmann::json& entry,
                       std::uint64_t data_begin, std::uint64_t data_bytes) {
    const auto dtype = entry.at("dtype").get<std::string>();
    if (element_bytes(dtype) == 0) {
        fail(path, fmt::format("tensor '{}' has dtype {}", name, entry.at("dtype").dump()));
    }
    HostTensor tensor{name, entry.at("shape").get<std::vector<std::int64_t>>(), {}, dtype};
    const auto offsets = entry.at("data_offsets").get<std::vector<std::uint64_t>>();
    std::uint64_t bytes = element_bytes(dtype);
    for (const std::int64_t extent : tensor.shape) {
        std::uint64_t product = 0;
        if (extent < 0 ||
            __builtin_mul_overflow(bytes, static_cast<std::uint64_t>(extent), &product)) {
            fail(path, fmt::format("tensor '{}' has an impossible shape", name));
        }
        bytes = product;
    }
    if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > data_bytes ||
        offsets[1] - offsets[0] != bytes) {
        fail(path,
             fmt::format("tensor '{}' of {} bytes does not match its data_offsets {} "
                         "in {} bytes of data from offset {} on",
                         name, bytes, entry.at("data_offsets").dump(), data_bytes, data_begin));
    }
    tensor.values.resize(bytes / element_bytes(dtype));
    std::vector<char> raw(dtype == "F32" ? 0 : bytes);
    in.seekg(static_cast<std::streamoff>(data_begin + offsets[0]));
    in.read(raw.empty() ? reinterpret_cast<char*>(tensor.values.data()) : raw.data(),
            static_cast<std::streamsize>(bytes));
    if (!in) {
        fail(path, fmt::format("tensor '{}' could not be read", name));
    }
    if (dtype == "F16") {
        convert<std::uint16_t>(raw, tensor.values, narrow::from_float16);
    } else if (dtype == "BF16") {
        convert<std::uint16_t>(raw, tensor.values, narrow::from_bfloat16);
    } else if (dtype == "F64") {
        convert<double>(raw, tensor.values, [&](double value) {
            if (std::isfinite(value) && std::abs(value) > double{FLT_MAX}) {
                fail(path, fmt::format("tensor '{}' has a value of {}, more than F32 holds", name,
                                       value));
            }
            return static_cast<float>(value);
        });
    }
    return tensor;
}

// Opens a file, emptied, that no other process writes to until this one closes it; -1: errno says
// why not.
int open_alone(const std::filesystem::path& path) {
    constexpr int kTries = 600;
    for (int i = 0; i < kTries; ++i) {
        const int descriptor =
            open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
        if (descriptor < 0) {
            return -1;
        }
        // Where the file system has no locks there is no waiting for others.
        const bool locked = flock(descriptor, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
        // Whoever had the lock may have renamed the file.
        struct stat own = {}, there = {};
        if (locked && fstat(descriptor, &own) == 0 && stat(path.c_str(), &there) == 0 &&
            own.st_ino == there.st_ino && own.st_dev == there.st_dev) {
            if (own.st_nlink > 1) {  // a killed job had given it its name: it is no draft any more
                unlink(path.c_str());
                close(descriptor);
                continue;
            }
            return ftruncate(descriptor, 0) == 0 ? descriptor : -1;
        }
        close(descriptor);
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    errno = EBUSY;
    return -1;
}

// The file's header, as text.
std::string header_of(const TensorFile& file) {
    nlohmann::ordered_json header;
    nlohmann::ordered_json metadata = file.metadata;
    metadata["format"] = "pt";
    header["__metadata__"] = metadata;
    std::uint64_t offset = 0;
    for (const HostTensor& tensor : file.tensors) {
        const std::uint64_t bytes = tensor.values.size() * sizeof(float);
        header[tensor.name] = {
            {"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + bytes}}};
        offset += bytes;
    }
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the tensors are aligned
    return text;
}

// Whether all was written; errno says why not.
bool append(int descriptor, const void* data, std::size_t bytes) {
    constexpr std::size_t kMost = std::size_t{1} << 20;
    // For tests that stop a job while it writes.
    static const char* const pause = std::getenv("GYRE_TEST_WRITE_PAUSE_MS");
    for (const char* at = static_cast<const char*>(data); bytes > 0;) {
        const ssize_t part = write(descriptor, at, std::min(bytes, kMost));
        if (part < 0 && errno == EINTR) {
            continue;
        }
        if (part <= 0) {
            return false;
        }
        at += part;
        bytes -= static_cast<std::size_t>(part);
        if (pause != nullptr) {
            std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(pause)));
        }
    }
    return true;
}

// A further name for a file, in the place of what has it.
bool name_too(const std::filesystem::path& file, const std::filesystem::path& name) {
    const std::filesystem::path link = name.string() + ".gyre.link";
    std::error_code error;
    std::filesystem::remove(link, error);
    std::filesystem::create_hard_link(file, link, error);
    if (error) {  // the file system has none
        std::filesystem::copy_file(file, link, error);
    }
    errno = error.value();
    return !error && std::rename(link.c_str(), name.c_str()) == 0;
}

// So that names are on the disk, too. Not every file system lets a folder be synchronised.
void synchronize_folder(const std::filesystem::path& folder) {
    const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor >= 0) {
        fsync(descriptor);
        close(descriptor);
    }
}

}  // namespace

TensorFile read_safetensors(const std::filesystem::path& path) {
    std::error_code error;
    const std::uint64_t file_bytes = std::filesystem::file_size(path, error);
    if (error) {
        throw input_error(
            fmt::format("{}: cannot be read: {}; check the path", path.string(), error.message()));
    }
    std::ifstream in(path, std::ios::binary);
    refuse_pickle(path, in);
    std::uint64_t header_bytes = 0;
    if (file_bytes < sizeof header_bytes ||
        !in.read(reinterpret_cast<char*>(&header_bytes), sizeof header_bytes)) {
        fail(path, fmt::format("it ends after {} bytes, within the header's length", file_bytes));
    }
    if (header_bytes > kMostHeaderBytes || header_bytes > file_bytes - sizeof header_bytes) {
        fail(path, fmt::format("offset 0 says the header has {} bytes, but the file has {} in all",
                               header_bytes, file_bytes));
    }
    std::string header_text(header_bytes, '\0');
    in.read(header_text.data(), static_cast<std::streamsize>(header_bytes));
    const std::uint64_t data_begin = sizeof header_bytes + header_bytes;
    const std::uint64_t data_bytes = file_bytes - data_begin;

    TensorFile file;
    try {
        const auto header = nlohmann::json::parse(header_text);
        for (const auto& [name, entry] : header.items()) {
            if (name == "__metadata__") {
                file.metadata = entry.get<std::map<std::string, std::string>>();
                continue;
            }
            if (std::any_of(name.begin(), name.end(),
                            [](unsigned char c) { return c < 0x20 || c == 0x7f; })) {
                fail(path, "the name of a tensor has control characters");
            }
            if (name.ends_with(".num_batches_tracked")) {
                continue;  // PyTorch's count for a momentum of none, an integer; nothing here uses
                           // it
            }
            file.tensors.push_back(read_tensor(path, in, name, entry, data_begin, data_bytes));
        }
    } catch (const nlohmann::json::exception& problem) {
        fail(path, fmt::format("its header (offset 8, {} bytes) is not the JSON it should be: {}",
                               header_bytes, problem.what()));
    }
    return file;
}

void write_safetensors(const std::vector<std::filesystem::path>& names, const TensorFile& file) {
    const std::filesystem::path& path = names.back();
    const std::string header = header_of(file);
    const std::uint64_t header_bytes = header.size();
    // Always the same name: what a killed job left there is written over.
    const std::filesystem::path aside = path.string() + ".gyre.tmp";
    const int descriptor = open_alone(aside);
    bool written = descriptor >= 0 && append(descriptor, &header_bytes, sizeof header_bytes) &&
                   append(descriptor, header.data(), header.size());
    for (const HostTensor& tensor : file.tensors) {
        written = written &&
                  append(descriptor, tensor.values.data(), tensor.values.size() * sizeof(float));
    }
    written = written && fsync(descriptor) == 0;
    for (std::size_t i = 0; i + 1 < names.size(); ++i) {
        written = written && name_too(aside, names[i]);
    }
    // Closed only when it has its name, as others may write to it from then on.
    written = written && std::rename(aside.c_str(), path.c_str()) == 0;
    const int why = errno;
    if (!written && descriptor >= 0) {
        unlink(aside.c_str());
    }
    if (descriptor >= 0) {
        close(descriptor);
    }
    if (!written) {
        throw input_error(
            fmt::format("{}: the weights could not be written: {}; an earlier file "
                        "of this name is untouched",
                        path.string(), std::strerror(why)));
    }
    synchronize_folder(std::filesystem::absolute(path).parent_path());
}

}  // namespace gyre::model
