// Argument checks whose message names the argument, what it got and what it needs.
#pragma once

#include <sstream>
#include <stdexcept>

namespace memopt {

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

}  // namespace memopt

// Unlike STD_TORCH_CHECK this puts no source path before the message. Raises RuntimeError in
// Python.
#define MEMOPT_CHECK(condition, ...)               \
  do {                                             \
    if (!(condition)) ::memopt::fail(__VA_ARGS__); \
  } while (false)
