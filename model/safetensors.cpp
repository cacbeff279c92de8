#include "model/safetensors.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "kernels/error.hpp"

namespace gyre::model {
namespace {

static_assert(std::endian::native == std::endian::little,
              "the file format and these readers are little-endian");

constexpr std::uint64_t kMostHeaderBytes = 100'000'000;  // the format's own limit

[[noreturn]] void fail(const std::filesystem::path& path, const std::string& what) {
    throw input_error(
        fmt::format("{}: {}; expected a safetensors file of F32 tensors", path.string(), what));
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
            const auto dtype = entry.at("dtype").get<std::string>();
            if (dtype != "F32") {
                fail(path, fmt::format("tensor '{}' has dtype {}", name, dtype));
            }
            Tensor tensor{name, entry.at("shape").get<std::vector<std::int64_t>>(), {}};
            const auto offsets = entry.at("data_offsets").get<std::vector<std::uint64_t>>();
            std::uint64_t bytes = sizeof(float);
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
                fail(path, fmt::format("tensor '{}' of {} bytes does not match its data_offsets {} "
                                       "in {} bytes of data from offset {} on",
                                       name, bytes, entry.at("data_offsets").dump(), data_bytes,
                                       data_begin));
            }
            tensor.values.resize(bytes / sizeof(float));
            in.seekg(static_cast<std::streamoff>(data_begin + offsets[0]));
            in.read(reinterpret_cast<char*>(tensor.values.data()),
                    static_cast<std::streamsize>(bytes));
            if (!in) {
                fail(path, fmt::format("tensor '{}' could not be read", name));
            }
            file.tensors.push_back(std::move(tensor));
        }
    } catch (const nlohmann::json::exception& problem) {
        fail(path, fmt::format("its header (offset 8, {} bytes) is not the JSON it should be: {}",
                               header_bytes, problem.what()));
    }
    return file;
}

void write_safetensors(const std::filesystem::path& path, const TensorFile& file) {
    nlohmann::ordered_json header;
    nlohmann::ordered_json metadata = file.metadata;
    metadata["format"] = "pt";
    header["__metadata__"] = metadata;
    std::uint64_t offset = 0;
    for (const Tensor& tensor : file.tensors) {
        const std::uint64_t bytes = tensor.values.size() * sizeof(float);
        header[tensor.name] = {
            {"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + bytes}}};
        offset += bytes;
    }
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the tensors are aligned
    const std::uint64_t header_bytes = text.size();

    const std::filesystem::path aside =
        path.string() + fmt::format(".{}.tmp", static_cast<long>(getpid()));
    const int descriptor = open(aside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bool written = descriptor >= 0;
    const auto append = [&](const void* data, std::size_t bytes) {
        const char* at = static_cast<const char*>(data);
        while (written && bytes > 0) {
            const ssize_t part = write(descriptor, at, bytes);
            if (part < 0 && errno == EINTR) {
                continue;
            }
            written = part > 0;
            at += written ? part : 0;
            bytes -= written ? static_cast<std::size_t>(part) : 0;
        }
    };
    append(&header_bytes, sizeof header_bytes);
    append(text.data(), text.size());
    for (const Tensor& tensor : file.tensors) {
        append(tensor.values.data(), tensor.values.size() * sizeof(float));
    }
    written = written && fsync(descriptor) == 0;
    int why = errno;
    if (descriptor >= 0 && close(descriptor) != 0 && written) {
        written = false;
        why = errno;
    }
    if (written && std::rename(aside.c_str(), path.c_str()) != 0) {
        written = false;
        why = errno;
    }
    if (!written) {
        unlink(aside.c_str());
        throw input_error(
            fmt::format("{}: the weights could not be written: {}; an earlier file "
                        "of this name is untouched",
                        path.string(), std::strerror(why)));
    }
}

}  // namespace gyre::model
