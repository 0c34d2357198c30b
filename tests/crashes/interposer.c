/* A library to preload: it counts the calls that change files below one folder, and at one of them it
 * fails the call or ends the process, as a full disk, a broken disk or a power cut would.
 *
 *   crash_arm(root, point, mode)   begin to count; at the point-th call (from 1) do what mode says
 *   crash_count()                  calls counted since then
 *   crash_name(i)                  name of the i-th counted call and its path (the first 4,096)
 *
 * Modes: 0 only count; 1 end the process before the call; 2 write half of the data, then end the
 * process (for calls that write; others as 1); 3 fail this call with EIO; 4 fail this and every later
 * call that writes with ENOSPC.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define NAMES 4096

static char root[PATH_MAX];
static int mode = -1;
static long point, count;
static char names[NAMES][192];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void crash_arm(const char *folder, long at, int how) {
    snprintf(root, sizeof root, "%s", folder);
    point = at;
    count = 0;
    mode = how;
}

long crash_count(void) { return count; }

const char *crash_name(long index) {
    return index >= 0 && index < NAMES && index < count ? names[index] : "";
}

static int is_below_root(const char *path) {
    size_t length = strlen(root);
    return length && strncmp(path, root, length) == 0 && (path[length] == '/' || !path[length]);
}

/* The path behind a descriptor, or behind a name relative to a folder's descriptor. */
static int path_of(int folder, const char *name, char *path) {
    char link[64], base[PATH_MAX];
    if (name && name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
        return 1;
    }
    if (folder == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) return 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, base, sizeof base - 1);
        if (length < 0) return 0;
        base[length] = 0;
    }
    if (name) {
        if (snprintf(path, PATH_MAX, "%s/%s", base, name) >= PATH_MAX) return 0;
    } else {
        snprintf(path, PATH_MAX, "%s", base);
    }
    return 1;
}

static void end_process(void) { kill(getpid(), SIGKILL); }

enum { GO_ON, FAIL, HALF };

/* Counts one call and says what becomes of it. */
static int reached(const char *what, int folder, const char *name, int writes) {
    char path[PATH_MAX];
    if (mode < 0) return GO_ON;
    int saved = errno;
    if (!path_of(folder, name, path) || !is_below_root(path)) {
        errno = saved;
        return GO_ON;
    }
    pthread_mutex_lock(&mutex);
    long number = ++count;
    if (number <= NAMES)
        snprintf(names[number - 1], sizeof names[0], "%s %s", what, path + strlen(root));
    pthread_mutex_unlock(&mutex);
    errno = saved;
    if (mode == 1 && number == point) end_process();
    if (mode == 2 && number == point) {
        if (writes) return HALF;
        end_process();
    }
    if (mode == 3 && number == point) {
        errno = EIO;
        return FAIL;
    }
    if (mode == 4 && number >= point && writes) {
        errno = ENOSPC;
        return FAIL;
    }
    return GO_ON;
}

#define REAL(result, name, ...) \
    static result (*real)(__VA_ARGS__); \
    if (!real) real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

#define WRITER(result, name, signature, arguments, half, types...) \
    result name signature { \
        REAL(result, name, types); \
        int verdict = reached(#name, fd, NULL, 1); \
        if (verdict == FAIL) return -1; \
        if (verdict == HALF) { \
            half; \
            end_process(); \
        } \
        return real arguments; \
    }

WRITER(ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size), real(fd, data, size / 2), int, const void *, size_t)
WRITER(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at), real(fd, data, size / 2, at), int, const void *, size_t, off_t)
WRITER(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at), real(fd, data, size / 2, at), int, const void *, size_t, off64_t)
WRITER(ssize_t, writev, (int fd, const struct iovec *parts, int number), (fd, parts, number), real(fd, parts, number / 2), int, const struct iovec *, int)
WRITER(int, ftruncate, (int fd, off_t size), (fd, size), , int, off_t)
WRITER(int, ftruncate64, (int fd, off64_t size), (fd, size), , int, off64_t)

#define ON_DESCRIPTOR(name) \
    int name(int fd) { \
        REAL(int, name, int); \
        return reached(#name, fd, NULL, 0) == FAIL ? -1 : real(fd); \
    }
ON_DESCRIPTOR(fsync)
ON_DESCRIPTOR(fdatasync)

ssize_t sendfile64(int out, int in, off64_t *at, size_t size) {
    REAL(ssize_t, sendfile64, int, int, off64_t *, size_t);
    return reached("sendfile", out, NULL, 1) == FAIL ? -1 : real(out, in, at, size);
}
ssize_t sendfile(int out, int in, off_t *at, size_t size) {
    REAL(ssize_t, sendfile, int, int, off_t *, size_t);
    return reached("sendfile", out, NULL, 1) == FAIL ? -1 : real(out, in, at, size);
}
ssize_t copy_file_range(int in, off64_t *in_at, int out, off64_t *out_at, size_t size, unsigned flags) {
    REAL(ssize_t, copy_file_range, int, off64_t *, int, off64_t *, size_t, unsigned);
    return reached("copy_file_range", out, NULL, 1) == FAIL ? -1 : real(in, in_at, out, out_at, size, flags);
}

#define ON_PATH(name) \
    int name(const char *path) { \
        REAL(int, name, const char *); \
        return reached(#name, AT_FDCWD, path, 0) == FAIL ? -1 : real(path); \
    }
ON_PATH(unlink)
ON_PATH(rmdir)

int mkdir(const char *path, mode_t rights) {
    REAL(int, mkdir, const char *, mode_t);
    return reached("mkdir", AT_FDCWD, path, 1) == FAIL ? -1 : real(path, rights);
}
int mkdirat(int folder, const char *path, mode_t rights) {
    REAL(int, mkdirat, int, const char *, mode_t);
    return reached("mkdir", folder, path, 1) == FAIL ? -1 : real(folder, path, rights);
}
int unlinkat(int folder, const char *path, int flags) {
    REAL(int, unlinkat, int, const char *, int);
    return reached("unlink", folder, path, 0) == FAIL ? -1 : real(folder, path, flags);
}
int rename(const char *from, const char *to) {
    REAL(int, rename, const char *, const char *);
    return reached("rename", AT_FDCWD, to, 0) == FAIL ? -1 : real(from, to);
}
int renameat(int a, const char *from, int b, const char *to) {
    REAL(int, renameat, int, const char *, int, const char *);
    return reached("rename", b, to, 0) == FAIL ? -1 : real(a, from, b, to);
}
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    REAL(int, renameat2, int, const char *, int, const char *, unsigned);
    return reached("rename", b, to, 0) == FAIL ? -1 : real(a, from, b, to, flags);
}
int link(const char *from, const char *to) {
    REAL(int, link, const char *, const char *);
    return reached("link", AT_FDCWD, to, 1) == FAIL ? -1 : real(from, to);
}
int symlink(const char *from, const char *to) {
    REAL(int, symlink, const char *, const char *);
    return reached("symlink", AT_FDCWD, to, 1) == FAIL ? -1 : real(from, to);
}

#define OPENER(name, call) \
    int name(const char *path, int flags, ...) { \
        REAL(int, name, const char *, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t rights = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        if (flags & (O_CREAT | O_TRUNC) && reached("open", AT_FDCWD, path, 1) == FAIL) return -1; \
        return real(path, flags, rights); \
    }
OPENER(open, open)
OPENER(open64, open64)

#define OPENER_AT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(int, name, int, const char *, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t rights = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        if (flags & (O_CREAT | O_TRUNC) && reached("open", folder, path, 1) == FAIL) return -1; \
        return real(folder, path, flags, rights); \
    }
OPENER_AT(openat)
OPENER_AT(openat64)

/* stdio: glibc's own calls behind fopen, fwrite and fclose cannot be replaced one by one. */
#define STREAM_OPENER(name) \
    FILE *name(const char *path, const char *how) { \
        REAL(FILE *, name, const char *, const char *); \
        if (strpbrk(how, "wa+") && reached("fopen", AT_FDCWD, path, 1) == FAIL) return NULL; \
        return real(path, how); \
    }
STREAM_OPENER(fopen)
STREAM_OPENER(fopen64)

size_t fwrite(const void *data, size_t size, size_t number, FILE *file) {
    REAL(size_t, fwrite, const void *, size_t, size_t, FILE *);
    int verdict = mode >= 0 && file ? reached("fwrite", fileno(file), NULL, 1) : GO_ON;
    if (verdict == FAIL) return 0;
    if (verdict == HALF) {
        real(data, size, number / 2, file);
        fflush(file);
        end_process();
    }
    return real(data, size, number, file);
}
