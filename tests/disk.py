"""A disk that is full, for this process alone."""

import contextlib
import resource


@contextlib.contextmanager
def largest_file(size):
    """Files cannot grow beyond `size` bytes, as on a full disk: a short write, then an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
