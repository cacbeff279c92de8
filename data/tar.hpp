// Lists what is in a tar file, with libarchive, which is loaded when it is needed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace gyre::data {

struct TarMember {
    std::string name = {};        // as stored, perhaps with ./ before it
    std::uint64_t offset = 0;     // of its bytes in the tar file
    std::string_view bytes = {};  // valid during the call that receives it
    bool is_link = false;         // to another member: it has no bytes of its own
};

// Calls visit() for each member of an uncompressed tar file (ustar, pax or GNU's) but its folders,
// in order. Throws input_error if it cannot be read, is compressed, damaged or cut off, or if
// libarchive is not found: GYRE_ARCHIVE_LIBRARY is the path of another libarchive.so.13.
void visit_tar(const std::filesystem::path& path,
               const std::function<void(const TarMember&)>& visit);

// True if libarchive is found.
bool tar_available();

}  // namespace gyre::data
