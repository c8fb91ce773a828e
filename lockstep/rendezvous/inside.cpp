#include "lockstep/rendezvous/inside.h"

#include <fcntl.h>
#include <unistd.h>

#include "lockstep/core/env.h"
#include "lockstep/core/fd.h"
#include "lockstep/rendezvous/rank_env.h"

namespace lockstep::inside {
namespace {

std::string mark_beside(const std::string& error_file) {
  return error_file + ".inside";
}

// Empty where nobody would look for it.
std::string own_mark() {
  const auto error_file = env::get("TORCHELASTIC_ERROR_FILE");
  return error_file && under_lockstep_run() ? mark_beside(*error_file) : "";
}

}  // namespace

void enter() noexcept {
  try {
    const std::string mark = own_mark();
    if (!mark.empty()) Fd(::open(mark.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644)).reset();
  } catch (...) {
  }
}

void leave() noexcept {
  try {
    const std::string mark = own_mark();
    if (!mark.empty()) ::unlink(mark.c_str());
  } catch (...) {
  }
}

bool take_mark(const std::string& error_file) noexcept {
  try {
    return !error_file.empty() && ::unlink(mark_beside(error_file).c_str()) == 0;
  } catch (...) {
    return false;
  }
}

}  // namespace lockstep::inside
