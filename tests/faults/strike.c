/* Counts what a process changes below a folder, or opens there to read, and strikes at the n-th.

   Preloaded (LD_PRELOAD), its functions stand before those of the C library, for Python and for the
   threads of native libraries alike. They only pass calls on until `arm` has been called with the
   name of a file that holds `struct plan`; whoever wrote that file reads the counts in it. */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PASS, FAIL, BEFORE, HALF, AFTER }; /* HALF: of the bytes of a write; else AFTER */

static struct plan {
    long reads;       /* 0: strikes at changes; 1: at openings to read */
    long nth, times;  /* strikes from the nth on, so many times */
    long how, number; /* FAIL with an errno, else the signal that is sent to the process */
    long count[2];    /* of changes, of openings to read */
    char struck[PATH_MAX]; /* the call and the path where it struck first */
    char folder[PATH_MAX];
} *plan;

int arm(const char *path) {
    int file = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0);
    void *at = mmap(NULL, sizeof *plan, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED) return -1;
    plan = at;
    return 0;
}

/* The path without the folder of the plan; NULL: it lies elsewhere. No path: the file itself. */
static const char *below(int folder, const char *path, char *whole) {
    whole[0] = 0;
    if (path == NULL || path[0] != '/') {
        char link[40];
        snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d",
                 folder);
        long length = syscall(SYS_readlinkat, AT_FDCWD, link, whole, PATH_MAX - 1);
        whole[length < 0 ? 0 : length] = 0;
        if (path) strncat(whole, "/", PATH_MAX - 1 - strlen(whole));
    }
    if (path) strncat(whole, path, PATH_MAX - 1 - strlen(whole));
    const char *rest = whole + strlen(plan->folder);
    int inside = strncmp(whole, plan->folder, rest - whole) == 0 && (*rest == '/' || *rest == 0);
    return inside ? rest : NULL;
}

/* Before each call: counts it, and says what becomes of it. */
static int arrive(int reads, const char *call, int folder, const char *path) {
    char whole[PATH_MAX];
    if (plan == NULL) return PASS;
    int before = errno;
    const char *rest = below(folder, path, whole);
    errno = before;
    if (rest == NULL) return PASS;
    long count = __atomic_add_fetch(&plan->count[reads], 1, __ATOMIC_SEQ_CST);
    if (plan->how == PASS || reads != plan->reads) return PASS;
    if (count < plan->nth || count >= plan->nth + plan->times) return PASS;
    if (count == plan->nth) snprintf(plan->struck, PATH_MAX, "%s %s", call, rest);
    if (plan->how == FAIL) errno = plan->number;
    if (plan->how == BEFORE) kill(getpid(), plan->number);
    return plan->how;
}

#define SHARE(size) (now == HALF ? ((size) + 1) / 2 : (size))
#define CALL(reads, type, name, folder, path, call)                  \
    int now = arrive(reads, name, folder, path);                     \
    if (now == FAIL) return -1;                                      \
    type result = call;                                              \
    if (now == HALF || now == AFTER) kill(getpid(), plan->number);   \
    return result;
#define CHANGE(type, name, parameters, folder, path, call) \
    type name parameters { CALL(0, type, #name, folder, path, call) }

CHANGE(ssize_t, write, (int f, const void *data, size_t size), f, NULL,
       syscall(SYS_write, f, data, SHARE(size)))
CHANGE(ssize_t, pwrite, (int f, const void *data, size_t size, off_t at), f, NULL,
       syscall(SYS_pwrite64, f, data, SHARE(size), at))
CHANGE(ssize_t, writev, (int f, const struct iovec *data, int count), f, NULL,
       syscall(SYS_writev, f, data, count))
CHANGE(ssize_t, sendfile, (int f, int from, off_t *at, size_t size), f, NULL,
       syscall(SYS_sendfile, f, from, at, SHARE(size)))
CHANGE(int, fsync, (int f), f, NULL, syscall(SYS_fsync, f))
CHANGE(int, fdatasync, (int f), f, NULL, syscall(SYS_fdatasync, f))
CHANGE(int, ftruncate, (int f, off_t size), f, NULL, syscall(SYS_ftruncate, f, size))
CHANGE(int, fallocate, (int f, int mode, off_t at, off_t size), f, NULL,
       syscall(SYS_fallocate, f, mode, at, size))
CHANGE(int, truncate, (const char *p, off_t size), AT_FDCWD, p, syscall(SYS_truncate, p, size))
CHANGE(int, mkdir, (const char *p, mode_t mode), AT_FDCWD, p,
       syscall(SYS_mkdirat, AT_FDCWD, p, mode))
CHANGE(int, mkdirat, (int d, const char *p, mode_t mode), d, p, syscall(SYS_mkdirat, d, p, mode))
CHANGE(int, rmdir, (const char *p), AT_FDCWD, p, syscall(SYS_unlinkat, AT_FDCWD, p, AT_REMOVEDIR))
CHANGE(int, unlink, (const char *p), AT_FDCWD, p, syscall(SYS_unlinkat, AT_FDCWD, p, 0))
CHANGE(int, unlinkat, (int d, const char *p, int flags), d, p,
       syscall(SYS_unlinkat, d, p, flags))
CHANGE(int, rename, (const char *p, const char *to), AT_FDCWD, to,
       syscall(SYS_renameat2, AT_FDCWD, p, AT_FDCWD, to, 0))
CHANGE(int, renameat, (int d, const char *p, int e, const char *to), e, to,
       syscall(SYS_renameat2, d, p, e, to, 0))
CHANGE(int, link, (const char *p, const char *to), AT_FDCWD, to,
       syscall(SYS_linkat, AT_FDCWD, p, AT_FDCWD, to, 0))
CHANGE(int, symlink, (const char *target, const char *p), AT_FDCWD, p,
       syscall(SYS_symlinkat, target, AT_FDCWD, p))

int remove(const char *path) {
    int result = unlink(path);
    return result && errno == EISDIR ? rmdir(path) : result;
}

static int opened(const char *name, int folder, const char *path, int flags, mode_t mode) {
    int reads = !(flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC));
    CALL(reads, int, name, folder, path, syscall(SYS_openat, folder, path, flags, mode))
}

#define OPEN(name, folder, ...)                                            \
    int name(__VA_ARGS__, int flags, ...) {                                \
        va_list rest;                                                      \
        va_start(rest, flags);                                             \
        mode_t mode = va_arg(rest, mode_t); /* ignored where none is given */ \
        va_end(rest);                                                      \
        return opened(#name, folder, path, flags, mode);                   \
    }
OPEN(open, AT_FDCWD, const char *path)
OPEN(open64, AT_FDCWD, const char *path)
OPEN(openat, folder, int folder, const char *path)
OPEN(openat64, folder, int folder, const char *path)

DIR *opendir(const char *path) {
    int folder = opened("opendir", AT_FDCWD, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    return folder < 0 ? NULL : fdopendir(folder);
}

ssize_t pwrite64(int, const void *, size_t, off_t) __attribute__((alias("pwrite")));
ssize_t sendfile64(int, int, off_t *, size_t) __attribute__((alias("sendfile")));
int ftruncate64(int, off_t) __attribute__((alias("ftruncate")));
int truncate64(const char *, off_t) __attribute__((alias("truncate")));
int fallocate64(int, int, off_t, off_t) __attribute__((alias("fallocate")));
