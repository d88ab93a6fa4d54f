/* Preloaded into a server: while the file that FULL_DISK names exists, no file grows. What is there can be written. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static int grows(int fd, off_t end)
{
    const char *flag = getenv("FULL_DISK");
    struct stat file;

    return flag != NULL && access(flag, F_OK) == 0 && fstat(fd, &file) == 0 && S_ISREG(file.st_mode) &&
           end > file.st_size;
}

static off_t length(const struct iovec *parts, int count)
{
    off_t sum = 0;

    for (int i = 0; i < count; i++)
        sum += parts[i].iov_len;
    return sum;
}

#define REAL(name) ((__typeof__(&name)) dlsym(RTLD_NEXT, #name))
#define FULL (errno = ENOSPC, -1)

ssize_t pwrite(int fd, const void *data, size_t size, off_t at)
{
    return grows(fd, at + size) ? FULL : REAL(pwrite)(fd, data, size, at);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at)
{
    return grows(fd, at + size) ? FULL : REAL(pwrite64)(fd, data, size, at);
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at)
{
    return grows(fd, at + length(parts, count)) ? FULL : REAL(pwritev)(fd, parts, count, at);
}

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at)
{
    return grows(fd, at + length(parts, count)) ? FULL : REAL(pwritev64)(fd, parts, count, at);
}

int posix_fallocate(int fd, off_t at, off_t size)
{
    return grows(fd, at + size) ? ENOSPC : REAL(posix_fallocate)(fd, at, size);
}

int posix_fallocate64(int fd, off64_t at, off64_t size)
{
    return grows(fd, at + size) ? ENOSPC : REAL(posix_fallocate64)(fd, at, size);
}
