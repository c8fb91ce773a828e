// The version of these headers, for the preprocessor and as text. CMakeLists.txt reads it from
// here.
//
//   static_assert(LOCKSTEP_VERSION_MAJOR > 0 || LOCKSTEP_VERSION_MINOR >= 1);
//   std::puts("Lockstep " LOCKSTEP_VERSION);
//
// `lockstep --version` also prints commit, LibTorch and compiler.
#pragma once

#define LOCKSTEP_VERSION_MAJOR 0
#define LOCKSTEP_VERSION_MINOR 3
#define LOCKSTEP_VERSION_PATCH 0

#define LOCKSTEP_DETAIL_DOTTED(a, b, c) #a "." #b "." #c
#define LOCKSTEP_DETAIL_EXPAND(a, b, c) LOCKSTEP_DETAIL_DOTTED(a, b, c)
#define LOCKSTEP_VERSION \
  LOCKSTEP_DETAIL_EXPAND(LOCKSTEP_VERSION_MAJOR, LOCKSTEP_VERSION_MINOR, LOCKSTEP_VERSION_PATCH)
