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


def of_another_machine(folder):
    """Makes a claim that is held look like that of a machine that may have gone."""
    (folder / claims.LOCK).write_text("elsewhere process 7\nboot 00000000\n")


def test_a_claim_of_another_machine_is_waited_for_and_taken_over(tmp_path):
    worker = subprocess.Popen([sys.executable, "-c", CLAIM, tmp_path], stdout=subprocess.PIPE)
    assert worker.stdout is not None and worker.stdout.readline() == b"held\n"
    of_another_machine(tmp_path)
    looks: list[None] = []

    def asked():
        looks.append(None)
        worker.kill()
        worker.wait()
        return False

    with claims.claim(tmp_path, patience_s=60, asked=asked):
        assert len(looks) == 1
    worker.communicate()


def refusal(folder, **waits):
    """What a worker is told that cannot have a claim."""
    with pytest.raises(claims.RunClaimed) as told, claims.claim(folder, **waits):
        pass
    assert "\n" not in str(told.value)
    return str(told.value)


def test_a_claim_of_another_machine_is_not_waited_for_for_ever(tmp_path):
    with claims.claim(tmp_path):
        of_another_machine(tmp_path)
        assert "by elsewhere process 7:" in refusal(tmp_path, patience_s=0.01)


def test_who_is_asked_to_leave_waits_no_more(tmp_path):
    with claims.claim(tmp_path):
        of_another_machine(tmp_path)
        refusal(tmp_path, patience_s=1e9, asked=lambda: True)


def test_a_claim_of_this_machine_is_not_waited_for(tmp_path):
    with claims.claim(tmp_path):
        assert f"process {os.getpid()}" in refusal(tmp_path, patience_s=1e9)


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe", b"old format process 3"])
def test_whatever_the_lock_file_holds_a_claim_is_told_in_one_line(tmp_path, content):
    with claims.claim(tmp_path):
        (tmp_path / claims.LOCK).write_bytes(content)
        assert "is being trained by" in refusal(tmp_path)
