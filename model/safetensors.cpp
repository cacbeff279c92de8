#include "model/safetensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cfloat>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/data_type.hpp"
#include "base/error.hpp"
#include "base/json_integer.hpp"
#include "model/whole_file.hpp"

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

// Files of torch.save or pickle are recognised by their first bytes: a zip file's, or those of a
// pickle of protocol 2 to 5, without JSON after 8 bytes.
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

// The integers of a list in a header.
template <class Integer>
std::vector<Integer> integers(const nlohmann::json& list) {
    std::vector<Integer> values;
    for (const nlohmann::json& value : list) {
        values.push_back(json_integer<Integer>(value));
    }
    return values;
}

// As the format has it, tensors follow each other without holes up to the end of the file. Throws
// JSON's exceptions if an entry lacks something.
void require_whole(const std::filesystem::path& path, const nlohmann::json& header,
                   std::uint64_t data_begin, std::uint64_t data_bytes) {
    std::vector<std::pair<std::uint64_t, std::uint64_t>> parts;
    for (const auto& [name, entry] : header.items()) {
        if (name != "__metadata__") {
            const auto& offsets = entry.at("data_offsets");
            parts.emplace_back(json_integer<std::uint64_t>(offsets.at(0)),
                               json_integer<std::uint64_t>(offsets.at(1)));
        }
    }
    std::sort(parts.begin(), parts.end());
    std::uint64_t end = 0;
    for (const auto& [first, last] : parts) {
        if (first != end) {
            fail(path, fmt::format("after offset {} of the data, which begin at offset {}, comes a "
                                   "tensor with data_offsets [{},{}]",
                                   end, data_begin, first, last));
        }
        end = last;
    }
    if (end != data_bytes) {
        fail(path, fmt::format("its tensors are {} bytes from offset {} on, but the file has {} "
                               "bytes there: something was added",
                               end, data_begin, data_bytes));
    }
}

// The tensor of one entry of the header. data_begin, data_bytes: where the file's tensors are.
// Throws input_error if the entry does not fit them, and JSON's exceptions if it lacks
// something.
HostTensor read_tensor(const std::filesystem::path& path, std::ifstream& in,
                       const std::string& name, const nlohmann::json& entry,
                       std::uint64_t data_begin, std::uint64_t data_bytes) {
    const auto dtype = entry.at("dtype").get<std::string>();
    if (element_bytes(dtype) == 0) {
        fail(path, fmt::format("tensor '{}' has dtype {}", name, entry.at("dtype").dump()));
    }
    HostTensor tensor{name, integers<std::int64_t>(entry.at("shape")), {}, dtype};
    const auto offsets = integers<std::uint64_t>(entry.at("data_offsets"));
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

    const auto fail_by = [&](const std::exception& problem) {
        fail(path, fmt::format("its header (offset 8, {} bytes) is not the JSON it should be: {}",
                               header_bytes, problem.what()));
    };
    TensorFile file;
    try {
        const auto header = nlohmann::json::parse(header_text);
        if (!header.is_object()) {
            fail(path,
                 fmt::format("its header (offset 8, {} bytes) is not a JSON object", header_bytes));
        }
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
        require_whole(path, header, data_begin, data_bytes);
    } catch (const nlohmann::json::exception& problem) {
        fail_by(problem);
    } catch (const std::out_of_range& problem) {
        fail_by(problem);
    }
    return file;
}

void write_safetensors(const std::vector<std::filesystem::path>& names, const TensorFile& file) {
    const std::string header = header_of(file);
    const std::uint64_t header_bytes = header.size();
    std::vector<std::string_view> pieces = {
        {reinterpret_cast<const char*>(&header_bytes), sizeof header_bytes}, header};
    for (const HostTensor& tensor : file.tensors) {
        pieces.emplace_back(reinterpret_cast<const char*>(tensor.values.data()),
                            tensor.values.size() * sizeof(float));
    }
    write_whole_file(names, pieces, "the weights");
}

}  // namespace gyre::model
