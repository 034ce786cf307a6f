/* Records writes and flushes of a SQLite file and its log at the end of the file that $RECORDED_WRITES names.
 *
 * A write is recorded when it is done, a flush when it begins and when it has ended. So what was recorded before a flush
 * began is on the disk when it has ended, whichever process has written it. Flushes take a little longer than without.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

struct entry {
    char kind, file, unused[2];
    uint32_t thread;
    uint64_t offset, length;
};

static int ends(const char *name, const char *ending) {
    size_t length = strlen(name), wanted = strlen(ending);
    return length >= wanted && !strcmp(name + length - wanted, ending);
}

/* 'd' for the database, 'w' for its log, 0 for any other file. */
static char kind_of(int file) {
    char link[64], name[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, name, sizeof name - 1);
    if (length < 0)
        return 0;
    name[length] = 0;
    return ends(name, ".db") ? 'd' : ends(name, ".db-wal") ? 'w' : 0;
}

static void record(char kind, char file, uint64_t offset, const void *data, uint64_t length) {
    static int log = -1;
    if (log < 0)
        log = open(getenv("RECORDED_WRITES"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    struct entry entry = {kind, file, {0}, syscall(SYS_gettid), offset, data ? length : 0};
    struct iovec parts[] = {{&entry, sizeof entry}, {(void *)data, entry.length}};
    if (syscall(SYS_writev, log, parts, 2) != (ssize_t)(sizeof entry + entry.length))
        abort();
}

static ssize_t wrote(int file, off_t offset, const void *data, ssize_t written) {
    char kind = written > 0 ? kind_of(file) : 0;
    if (kind)
        record('w', kind, offset, data, written);
    return written;
}

ssize_t pwrite(int file, const void *data, size_t size, off_t offset) {
    return wrote(file, offset, data, syscall(SYS_pwrite64, file, data, size, offset));
}

ssize_t pwrite64(int file, const void *data, size_t size, off_t offset) { return pwrite(file, data, size, offset); }

ssize_t write(int file, const void *data, size_t size) {
    off_t offset = lseek(file, 0, SEEK_CUR);
    return wrote(file, offset, data, syscall(SYS_write, file, data, size));
}

int ftruncate(int file, off_t size) {
    int failed = syscall(SYS_ftruncate, file, size);
    char kind = failed ? 0 : kind_of(file);
    if (kind)
        record('t', kind, size, 0, 0);
    return failed;
}

int ftruncate64(int file, off_t size) { return ftruncate(file, size); }

static int flush(int file, int call) {
    char kind = kind_of(file);
    if (kind)
        record('b', kind, 0, 0, 0);
    usleep(kind ? 1000 : 0);
    int failed = syscall(call, file);
    if (kind && !failed)
        record('e', kind, 0, 0, 0);
    return failed;
}

int fdatasync(int file) { return flush(file, SYS_fdatasync); }

int fsync(int file) { return flush(file, SYS_fsync); }
