"""A relay carries both ways; its near end outlives the far one, and takes that along."""

from __future__ import annotations

import socket

import pytest

from xmod_jax.relay import Relay

_LONG = 15  # seconds within which anything here happens


@pytest.fixture
def ends():
    """A connection through a relay: its near end, and what the far end accepted."""
    with socket.create_server(("localhost", 0)) as server:
        relay = Relay("localhost", server.getsockname()[1])
        near = socket.create_connection(("localhost", relay.port), _LONG)
        far, _ = server.accept()
    far.settimeout(_LONG)
    with near, far:
        yield near, far


def test_what_is_said_arrives_in_both_directions(ends):
    for source, sink in (ends, ends[::-1]):
        source.sendall(b"a" * 100_000)
        assert len(sink.makefile("rb").read(100_000)) == 100_000


def test_the_near_end_stays_open_when_the_far_one_breaks(ends):
    near, far = ends
    near.sendall(b"a")
    assert far.recv(1) == b"a"
    far.close()
    near.settimeout(0.3)
    with pytest.raises(TimeoutError):
        near.recv(1)


def test_the_far_end_ends_with_the_near_one(ends):
    near, far = ends
    near.close()
    assert far.recv(1) == b""
