/* Makes the k-th write, fsync, rename or read below a folder fail, and notes all that is done there.

   Loaded with LD_PRELOAD: Python's own files, and those that safetensors, PyTorch, NumPy, Pillow and
   tokenizers write by themselves, pass here. Two things do not: what is read through mmap, and the
   rename at the end of safetensors' `save_file`, a system call of its own; that one is noted when
   its file is closed. Counts are shared with forked processes. `shim.py` calls `faults_...`. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { WRITE, FSYNC, RENAME, READ, KINDS };
enum verdict { PASS, FAIL, SHORT };

static struct { long count[KINDS], fired; } *shared;
static struct { int kind, error, sticky, half, armed, log; long target; } plan = {.log = -1};
static char root[PATH_MAX];
static size_t root_length;
/* Under which name an open file was made. */
enum { FILES = 1024 };
static char *made_as[FILES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

/* Counts that no process has but this one and those it forks. */
__attribute__((constructor)) void faults_apart(void) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

/* kind < 0: nothing fails, and it is only counted. log < 0: nothing is noted. */
void faults_arm(const char *folder, int kind, long target, int error, int sticky, int half, int log) {
    snprintf(root, sizeof root, "%s/", folder);
    root_length = strlen(root);
    memset(shared, 0, sizeof *shared);
    plan.kind = kind, plan.target = target, plan.error = error;
    plan.sticky = sticky, plan.half = half, plan.log = log, plan.armed = 1;
}

void faults_disarm(void) { plan.armed = 0; }
long faults_count(int kind) { return shared->count[kind]; }
long faults_fired(void) { return shared->fired; }

static int below(const char *path) {
    return plan.armed && !strncmp(path, root, root_length);
}

/* The path of a name as the kernel sees it, links in its folders resolved; 1 where it is ours. */
static int named(int folder, const char *name, char *path) {
    char parent[PATH_MAX], whole[PATH_MAX];
    if (!plan.armed || !name) return 0;
    if (name[0] == '/' || folder == AT_FDCWD) {
        snprintf(parent, sizeof parent, "%s", name);
    } else {
        char link[64], at[PATH_MAX];
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t n = readlink(link, at, sizeof at - 1);
        if (n < 0) return 0;
        at[n] = 0;
        if (snprintf(parent, sizeof parent, "%s/%s", at, name) >= (int)sizeof parent) return 0;
    }
    for (size_t n = strlen(parent); n > 1 && parent[n - 1] == '/'; n--) parent[n - 1] = 0;
    char *slash = strrchr(parent, '/');
    const char *last = slash ? slash + 1 : parent;
    char base[NAME_MAX + 1];
    snprintf(base, sizeof base, "%s", last);
    if (slash) *(slash == parent ? slash + 1 : slash) = 0;
    if (!realpath(slash ? parent : ".", whole)) return 0;
    if (snprintf(path, PATH_MAX, "%s/%s", whole, base) >= PATH_MAX) return 0;
    return below(path);
}

static int opened(int file, char *path) {
    char link[64];
    *path = 0;
    if (!plan.armed || file < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    return below(path);
}

/* A line of what was done, and the bytes that were written after it. */
static void note(const char *what, const char *path, const char *other, long place,
                 const void *bytes, long count) {
    if (plan.log < 0) return;
    char line[2 * PATH_MAX + 128];
    int n = snprintf(line, sizeof line, "%s\t%s\t%s\t%ld\t%ld\n", what, path + root_length,
                     other ? other + root_length : "", place, count);
    struct iovec parts[2] = {{line, n}, {(void *)bytes, bytes ? count : 0}};
    static __typeof__(writev) *real;
    if (!real) real = (__typeof__(writev) *)dlsym(RTLD_NEXT, "writev");
    pthread_mutex_lock(&lock);
    if (real(plan.log, parts, 2) != n + (bytes ? count : 0)) abort();
    pthread_mutex_unlock(&lock);
}

static enum verdict judged(enum kind kind) {
    long number = __sync_add_and_fetch(&shared->count[kind], 1);
    if ((int)kind != plan.kind) return PASS;
    if (number != plan.target && !(plan.sticky && number > plan.target)) return PASS;
    __sync_fetch_and_add(&shared->fired, 1);
    errno = plan.error;
    return plan.half ? SHORT : FAIL;
}

/* Of a full disk: nothing can be made either. */
static int full(void) {
    if (!(plan.sticky && plan.kind == WRITE && shared->fired)) return 0;
    errno = plan.error;
    return 1;
}

static long place_of(int file) {
    struct stat about;
    if (fcntl(file, F_GETFL) & O_APPEND) return fstat(file, &about) ? 0 : about.st_size;
    return lseek(file, 0, SEEK_CUR);
}

static long dirname_length(const char *path) { return strrchr(path, '/') - path; }

/* Files: how they come to be. */

static int before_opening(const char *path, int flags) {
    struct stat about;
    int there = !stat(path, &about);
    if ((flags & O_CREAT) && !there && full()) return -1;
    if (there && S_ISREG(about.st_mode)) return flags & O_TRUNC ? 2 : 0;
    return flags & O_CREAT && !there ? 1 : 0;
}

static void after_opening(int file, int made, const char *path) {
    if (made == 1) {
        note("create", path, NULL, 0, NULL, 0);
        if (file < FILES) free(made_as[file]), made_as[file] = strdup(path);
    }
    if (made == 2) note("truncate", path, NULL, 0, NULL, 0);
}

#define OPEN(call, folder, name, flags) \
    char path[PATH_MAX]; \
    int ours = named(folder, name, path), made = 0; \
    if (ours && (made = before_opening(path, flags)) < 0) return -1; \
    int file = call; \
    if (ours && file >= 0) after_opening(file, made, path); \
    return file

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { \
        va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); \
    }

int open(const char *name, int flags, ...) {
    REAL(open); MODE(flags) OPEN(real(name, flags, mode), AT_FDCWD, name, flags);
}
int open64(const char *name, int flags, ...) {
    REAL(open64); MODE(flags) OPEN(real(name, flags, mode), AT_FDCWD, name, flags);
}
int openat(int folder, const char *name, int flags, ...) {
    REAL(openat); MODE(flags) OPEN(real(folder, name, flags, mode), folder, name, flags);
}
int openat64(int folder, const char *name, int flags, ...) {
    REAL(openat64); MODE(flags) OPEN(real(folder, name, flags, mode), folder, name, flags);
}
int creat(const char *name, mode_t mode) {
    REAL(creat); OPEN(real(name, mode), AT_FDCWD, name, O_CREAT | O_TRUNC);
}

#define FOPEN(call) \
    char path[PATH_MAX]; \
    int flags = mode[0] == 'w' ? O_CREAT | O_TRUNC : mode[0] == 'a' ? O_CREAT : 0; \
    int ours = named(AT_FDCWD, name, path), made = 0; \
    if (ours && (made = before_opening(path, flags)) < 0) return NULL; \
    FILE *file = call; \
    if (ours && file) after_opening(fileno(file), made, path); \
    return file

FILE *fopen(const char *name, const char *mode) { REAL(fopen); FOPEN(real(name, mode)); }
FILE *fopen64(const char *name, const char *mode) { REAL(fopen64); FOPEN(real(name, mode)); }

/* Bytes. */

#define WRITTEN(count, half_call, whole_call, place, bytes) \
    char path[PATH_MAX]; \
    if (!opened(file, path)) return whole_call; \
    enum verdict verdict = judged(WRITE); \
    if (verdict == FAIL) return -1; \
    long at = place; \
    ssize_t done = verdict == SHORT && (count) > 1 ? half_call : whole_call; \
    if (done > 0) note("write", path, NULL, at, bytes, done); \
    return done

ssize_t write(int file, const void *bytes, size_t n) {
    REAL(write); WRITTEN(n, real(file, bytes, n / 2), real(file, bytes, n), place_of(file), bytes);
}
ssize_t pwrite(int file, const void *bytes, size_t n, off_t at_) {
    REAL(pwrite); WRITTEN(n, real(file, bytes, n / 2, at_), real(file, bytes, n, at_), at_, bytes);
}
ssize_t pwrite64(int file, const void *bytes, size_t n, off64_t at_) {
    REAL(pwrite64); WRITTEN(n, real(file, bytes, n / 2, at_), real(file, bytes, n, at_), at_, bytes);
}
ssize_t writev(int file, const struct iovec *parts, int n) {
    REAL(writev);
    char path[PATH_MAX];
    if (!opened(file, path)) return real(file, parts, n);
    /* One write of all parts. */
    size_t size = 0, end = 0;
    for (int i = 0; i < n; i++) size += parts[i].iov_len;
    char *bytes = malloc(size + 1);
    for (int i = 0; i < n; end += parts[i++].iov_len)
        memcpy(bytes + end, parts[i].iov_base, parts[i].iov_len);
    ssize_t done = write(file, bytes, size);
    free(bytes);
    return done;
}
size_t fwrite(const void *bytes, size_t size, size_t n, FILE *stream) {
    REAL(fwrite);
    char path[PATH_MAX];
    if (!opened(fileno(stream), path)) return real(bytes, size, n, stream);
    enum verdict verdict = judged(WRITE);
    if (verdict == FAIL) return 0;
    /* A short write of a stream is an error: the library itself goes on after the system's. */
    if (verdict == SHORT) return real(bytes, size, n, stream);
    long at = ftell(stream);
    size_t done = real(bytes, size, n, stream);
    if (done) note("write", path, NULL, at, bytes, done * size);
    return done;
}
/* Not done for our files: Python then copies with read and write. */
ssize_t sendfile(int file, int from, off_t *at, size_t n) {
    REAL(sendfile);
    char path[PATH_MAX];
    if (opened(file, path)) { errno = ENOTSOCK; return -1; }
    return real(file, from, at, n);
}
ssize_t sendfile64(int file, int from, off64_t *at, size_t n) {
    REAL(sendfile64);
    char path[PATH_MAX];
    if (opened(file, path)) { errno = ENOTSOCK; return -1; }
    return real(file, from, at, n);
}
ssize_t copy_file_range(int from, off64_t *at, int file, off64_t *to, size_t n, unsigned flags) {
    REAL(copy_file_range);
    char path[PATH_MAX];
    if (opened(file, path)) { errno = EXDEV; return -1; }
    return real(from, at, file, to, n, flags);
}

#define CUT(call) \
    char path[PATH_MAX]; \
    int done = call; \
    if (!done && opened(file, path)) note("cut", path, NULL, size, NULL, 0); \
    return done

int ftruncate(int file, off_t size) { REAL(ftruncate); CUT(real(file, size)); }
int ftruncate64(int file, off64_t size) { REAL(ftruncate64); CUT(real(file, size)); }

#define READING(count, half_call, whole_call) \
    char path[PATH_MAX]; \
    if (!opened(file, path)) return whole_call; \
    enum verdict verdict = judged(READ); \
    if (verdict == FAIL) return -1; \
    return verdict == SHORT && (count) > 1 ? half_call : whole_call

ssize_t read(int file, void *bytes, size_t n) {
    REAL(read); READING(n, real(file, bytes, n / 2), real(file, bytes, n));
}
ssize_t pread(int file, void *bytes, size_t n, off_t at) {
    REAL(pread); READING(n, real(file, bytes, n / 2, at), real(file, bytes, n, at));
}
ssize_t pread64(int file, void *bytes, size_t n, off64_t at) {
    REAL(pread64); READING(n, real(file, bytes, n / 2, at), real(file, bytes, n, at));
}
size_t fread(void *bytes, size_t size, size_t n, FILE *stream) {
    REAL(fread);
    char path[PATH_MAX];
    if (!opened(fileno(stream), path)) return real(bytes, size, n, stream);
    return judged(READ) == FAIL ? 0 : real(bytes, size, n, stream);
}

/* On the disk. */

static int flushed(int file, int (*real)(int)) {
    char path[PATH_MAX];
    if (!opened(file, path)) {
        /* The folder itself. */
        if (!plan.armed || strlen(path) + 1 != root_length || strncmp(path, root, root_length - 1))
            return real(file);
        strcat(path, "/");
    }
    if (judged(FSYNC) != PASS) return -1;
    note("fsync", path, NULL, 0, NULL, 0);
    /* Not done: only the note counts, and hundreds of runs wait for no disk. */
    return 0;
}
int fsync(int file) { REAL(fsync); return flushed(file, real); }
int fdatasync(int file) { REAL(fdatasync); return flushed(file, real); }

/* Names. */

static void renamed(const char *old, const char *new) {
    note("rename", old, new, 0, NULL, 0);
    for (int i = 0; i < FILES; i++)
        if (made_as[i] && !strcmp(made_as[i], old)) free(made_as[i]), made_as[i] = strdup(new);
}

#define RENAMED(call, from_folder, from, to_folder, to) \
    char old[PATH_MAX], new[PATH_MAX]; \
    int leaves = named(from_folder, from, old), comes = named(to_folder, to, new); \
    if (!leaves && !comes) return call; \
    if (judged(RENAME) != PASS) return -1; \
    int done = call; \
    if (!done && leaves && comes) renamed(old, new); \
    return done

int rename(const char *from, const char *to) {
    REAL(rename); RENAMED(real(from, to), AT_FDCWD, from, AT_FDCWD, to);
}
int renameat(int a, const char *from, int b, const char *to) {
    REAL(renameat); RENAMED(real(a, from, b, to), a, from, b, to);
}
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    REAL(renameat2);
    if (flags & RENAME_EXCHANGE) {
        char one[PATH_MAX], other[PATH_MAX];
        if (!named(a, from, one) || !named(b, to, other)) return real(a, from, b, to, flags);
        if (judged(RENAME) != PASS) return -1;
        int done = real(a, from, b, to, flags);
        if (!done) note("exchange", one, other, 0, NULL, 0);
        return done;
    }
    RENAMED(real(a, from, b, to, flags), a, from, b, to);
}

#define LINKED(call, from_folder, from, to_folder, to) \
    char old[PATH_MAX], new[PATH_MAX]; \
    int ours = named(from_folder, from, old) && named(to_folder, to, new); \
    if (ours && full()) return -1; \
    int done = call; \
    if (!done && ours) note("link", old, new, 0, NULL, 0); \
    return done

int link(const char *from, const char *to) {
    REAL(link); LINKED(real(from, to), AT_FDCWD, from, AT_FDCWD, to);
}
int linkat(int a, const char *from, int b, const char *to, int flags) {
    REAL(linkat); LINKED(real(a, from, b, to, flags), a, from, b, to);
}

#define GONE(call, folder, name) \
    char path[PATH_MAX]; \
    int ours = named(folder, name, path), done = call; \
    if (!done && ours) note("remove", path, NULL, 0, NULL, 0); \
    return done

int unlink(const char *name) { REAL(unlink); GONE(real(name), AT_FDCWD, name); }
int rmdir(const char *name) { REAL(rmdir); GONE(real(name), AT_FDCWD, name); }
int remove(const char *name) { REAL(remove); GONE(real(name), AT_FDCWD, name); }
int unlinkat(int folder, const char *name, int flags) {
    REAL(unlinkat); GONE(real(folder, name, flags), folder, name);
}

#define MADE(call, folder, name) \
    char path[PATH_MAX]; \
    int ours = named(folder, name, path); \
    if (ours && full()) return -1; \
    int done = call; \
    if (!done && ours) note("folder", path, NULL, 0, NULL, 0); \
    return done

int mkdir(const char *name, mode_t mode) { REAL(mkdir); MADE(real(name, mode), AT_FDCWD, name); }
int mkdirat(int folder, const char *name, mode_t mode) {
    REAL(mkdirat); MADE(real(folder, name, mode), folder, name);
}

int close(int file) {
    REAL(close);
    char path[PATH_MAX];
    if (file >= 0 && file < FILES && made_as[file]) {
        struct stat about;
        /* Of a file in a folder that was renamed, the old name is one of ours no more either. */
        if (opened(file, path) && strcmp(path, made_as[file]) && !stat(path, &about) &&
            dirname_length(path) == dirname_length(made_as[file]) &&
            !strncmp(path, made_as[file], dirname_length(path)))
            note("rename", made_as[file], path, 0, NULL, 0);
        free(made_as[file]), made_as[file] = NULL;
    }
    return real(file);
}
