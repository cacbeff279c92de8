// The output of `gyre --version`.
#pragma once

#include <string>

namespace gyre::train {

// The version, the commit and the kind of build, in one line: "gyre 0.9.0 (commit 1235ee5abc,
// Release)". The commit ends in "-dirty" if sources were changed, and is "unknown" without git.
std::string version_text();

// version_text(), and below it, a line each: compiler, processor, instruction set in use and others
// compiled in, GPUs, and the libraries found on this machine. It has no newline at its end.
std::string about_text();

}  // namespace gyre::train
