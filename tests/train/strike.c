// Preloaded into a training process: counts the calls by which it changes files below STRIKE_PLACE,
// whichever thread makes them, writes each to STRIKE_LOG, and kills the process before the
// STRIKE_AT-th. (strace counts for each thread, and a saver's thread comes late.) An fsync of a
// file whose path contains STRIKE_SLOW takes STRIKE_SLOW_MS longer.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MOST_FDS 65536
static atomic_int count;
static atomic_char watched[MOST_FDS];

static int here(const char* path) {
  const char* place = getenv("STRIKE_PLACE");
  return place != NULL && path != NULL && strncmp(path, place, strlen(place)) == 0 &&
         strstr(path, "metrics") == NULL;
}

static int watched_fd(int fd) {
  return fd >= 0 && fd < MOST_FDS && atomic_load(&watched[fd]);
}

static void event(const char* call, const char* path) {
  const int now = atomic_fetch_add(&count, 1) + 1;
  const char* log = getenv("STRIKE_LOG");
  if (log != NULL) {
    char line[4096];
    const int size = snprintf(line, sizeof line, "%d %s %s\n", now, call, path);
    const int fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0644);
    if (fd >= 0) {
      if (syscall(SYS_write, fd, line, (size_t)size) < 0) abort();
      syscall(SYS_close, fd);
    }
  }
  const char* at = getenv("STRIKE_AT");
  if (at != NULL && atoi(at) == now) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
  }
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int watch(int fd, int on) {
  if (fd >= 0 && fd < MOST_FDS) atomic_store(&watched[fd], (char)on);
  return fd;
}

int open(const char* path, int flags, ...) {
  va_list args;
  va_start(args, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(args, mode_t) : 0;
  va_end(args);
  const int mine = here(path);
  if (mine && (flags & O_CREAT) != 0) event("open", path);
  return watch(REAL(open)(path, flags, mode), mine);
}
int open64(const char* path, int flags, ...) __attribute__((alias("open")));

int openat(int dir, const char* path, int flags, ...) {
  va_list args;
  va_start(args, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(args, mode_t) : 0;
  va_end(args);
  return watch(REAL(openat)(dir, path, flags, mode), here(path) || watched_fd(dir));
}

int close(int fd) {
  if (fd >= 0 && fd < MOST_FDS) atomic_store(&watched[fd], 0);
  return REAL(close)(fd);
}

ssize_t write(int fd, const void* data, size_t size) {
  if (watched_fd(fd)) event("write", "");
  return REAL(write)(fd, data, size);
}

int fsync(int fd) {
  if (watched_fd(fd)) {
    char link[64], path[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (readlink(link, path, sizeof path - 1) < 0) abort();
    event("fsync", path);
    const char* slow = getenv("STRIKE_SLOW");
    if (slow != NULL && strstr(path, slow) != NULL) {
      const long ms = atol(getenv("STRIKE_SLOW_MS"));
      const struct timespec time = {ms / 1000, ms % 1000 * 1000000};
      nanosleep(&time, NULL);
    }
  }
  return REAL(fsync)(fd);
}

int mkdir(const char* path, mode_t mode) {
  if (here(path)) event("mkdir", path);
  return REAL(mkdir)(path, mode);
}

int rename(const char* from, const char* to) {
  if (here(from)) event("rename", from);
  return REAL(rename)(from, to);
}

int unlink(const char* path) {
  if (here(path)) event("unlink", path);
  return REAL(unlink)(path);
}

int rmdir(const char* path) {
  if (here(path)) event("rmdir", path);
  return REAL(rmdir)(path);
}

int unlinkat(int dir, const char* path, int flags) {
  if (here(path) || watched_fd(dir)) event("unlinkat", path);
  return REAL(unlinkat)(dir, path, flags);
}

long syscall(long number, ...) {
  va_list args;
  va_start(args, number);
  long a[6];
  for (int i = 0; i < 6; ++i) a[i] = va_arg(args, long);
  va_end(args);
  if (number == SYS_renameat2 && here((const char*)a[1])) event("rename", (const char*)a[1]);
  return REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
