#include <dlfcn.h>
#include <execinfo.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <thread>
#include <typeinfo>

#include "lockstep/core/crash.h"

namespace lockstep::throw_trace {
namespace {

constexpr int kFrames = 48;
constexpr std::size_t kThrows = 16;

struct Throw {
  const void* object = nullptr;
  std::thread::id thread;
  int depth = 0;
  std::array<void*, kFrames> frames{};
};

struct State {
  std::mutex mutex;
  std::array<Throw, kThrows> latest;
  std::size_t next = 0;
};

std::atomic<bool> g_enabled{false};

State& state() {
  static State* state = new State;  // never destroyed: static destructors may throw and catch
  return *state;
}

void remember(const void* object, const void* thrower) {
  std::array<void*, kFrames + 4> frames{};
  const int depth = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  // Found by address: a sanitizer's backtrace() adds a frame of its own.
  const auto first = std::find(frames.begin(), frames.end(), thrower) - frames.begin();
  if (first >= depth) return;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  Throw& slot = s.latest[s.next++ % kThrows];
  slot.object = object;
  slot.thread = std::this_thread::get_id();
  slot.depth = std::min(depth - static_cast<int>(first), kFrames);
  std::copy_n(frames.begin() + first, slot.depth, slot.frames.begin());
}

template <typename Wanted>
std::vector<void*> find_if(Wanted wanted) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  for (std::size_t age = 1; age <= kThrows && age <= s.next; ++age) {
    const Throw& t = s.latest[(s.next - age) % kThrows];
    if (wanted(t)) return {t.frames.begin(), t.frames.begin() + t.depth};
  }
  return {};
}

}  // namespace

void enable() {
  state();
  void* frame = nullptr;
  ::backtrace(&frame, 1);  // loads the unwinder now, not inside a throw
  g_enabled = true;
}

std::vector<void*> find(const void* exception_object) {
  return find_if([=](const Throw& t) { return t.object == exception_object; });
}

std::vector<void*> find_latest() {
  return find_if([](const Throw& t) { return t.thread == std::this_thread::get_id(); });
}

}  // namespace lockstep::throw_trace

// The compiler's call for every `throw`. A definition in the program comes before the one in
// libstdc++.so, for the program and for the libraries it loads. Weak, so that a program linked with
// libstdc++.a keeps the archive's own; its reports then lack the place of the throw.
extern "C" [[noreturn]] __attribute__((weak, noinline)) void __cxa_throw(
    void* object, std::type_info* type, void (*destructor)(void*)) {
  using Function = void (*)(void*, std::type_info*, void (*)(void*));
  static const auto next = reinterpret_cast<Function>(::dlsym(RTLD_NEXT, "__cxa_throw"));
  if (lockstep::throw_trace::g_enabled.load(std::memory_order_relaxed))
    lockstep::throw_trace::remember(object, __builtin_return_address(0));
  next(object, type, destructor);
  __builtin_unreachable();
}
