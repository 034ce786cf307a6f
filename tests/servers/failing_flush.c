/* Makes fsync and fdatasync of files fail whose name ends as the file that $FAILING_FLUSH names says. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int fails(int file) {
    char link[64], name[4096], ending[256];
    const char *control = getenv("FAILING_FLUSH");
    int asked = control ? open(control, O_RDONLY | O_CLOEXEC) : -1;
    if (asked < 0)
        return 0;
    ssize_t wanted = read(asked, ending, sizeof ending);
    close(asked);
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, name, sizeof name);
    if (wanted <= 0 || length < wanted || memcmp(name + length - wanted, ending, wanted))
        return 0;
    errno = EIO;
    return 1;
}

int fdatasync(int file) { return fails(file) ? -1 : syscall(SYS_fdatasync, file); }

int fsync(int file) { return fails(file) ? -1 : syscall(SYS_fsync, file); }
