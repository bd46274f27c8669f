"""What programs are compiled with on CPU."""

import jax
import jax.numpy as jnp
import pytest

from xmod_jax.training import compilation


def text(compiler):
    a = jnp.ones((256, 256))
    return compiler(lambda a, b: (a @ b).sum(-1)).lower(a, a).compile().as_text()


def test_products_and_sums_stay_out_of_the_other_library():
    if "ynn_fusion" not in text(jax.jit):
        pytest.skip("this XLA hands nothing to it")
    assert "ynn_fusion" not in text(compilation.jit)


@pytest.fixture
def fresh_settings():
    compilation._cpu_settings.cache_clear()
    yield
    compilation._cpu_settings.cache_clear()


def test_an_option_that_this_xla_does_not_know_is_left_out(monkeypatch, fresh_settings):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(compilation, "_LEAST", {"xla_cpu_no_such_option": "X"})
    assert compilation._cpu_settings() == compilation._QUICK
    assert compilation.jit(lambda x: x + 1)(1) == 2


def test_what_the_user_set_in_xla_flags_stays(monkeypatch, fresh_settings):
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=3 --other=1")
    assert set(compilation._cpu_settings()) == set(compilation._LEAST)
