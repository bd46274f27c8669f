"""No two workers hold a folder, and a claim ends with its process."""

import errno
import os
import subprocess
import sys

import pytest

from xmod_jax import claims
from xmod_jax.errors import UserError

CLAIM = """
import sys, time
from xmod_jax import claims
with claims.claim(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_claim_excludes_a_second_one_and_ends_with_its_block(tmp_path):
    with claims.claim(tmp_path):
        with pytest.raises(claims.RunClaimed, match=r"process \d+"), claims.claim(tmp_path):
            pass
        other = subprocess.run([sys.executable, "-c", CLAIM, tmp_path], capture_output=True)
        assert other.returncode == 1 and b"RunClaimed" in other.stderr
    with claims.claim(tmp_path):
        pass


def test_a_file_system_without_locks_is_one_line(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(claims.fcntl, "flock", refuse)
    with pytest.raises(UserError, match="has no locks"), claims.claim(tmp_path):
        pass


def test_kill_9_releases_the_claim(tmp_path):
    worker = subprocess.Popen([sys.executable, "-c", CLAIM, tmp_path], stdout=subprocess.PIPE)
    assert worker.stdout is not None and worker.stdout.readline() == b"held\n"
    with pytest.raises(claims.RunClaimed), claims.claim(tmp_path):
        pass
    worker.kill()
    worker.communicate()
    with claims.claim(tmp_path):
        pass
