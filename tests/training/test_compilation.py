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


def test_an_option_that_this_xla_does_not_know_is_left_out(monkeypatch):
    monkeypatch.setattr(compilation, "_LEAST", {"xla_cpu_no_such_option": "X"})
    compilation._cpu_settings.cache_clear()
    try:
        assert compilation._cpu_settings() == compilation._QUICK
        assert compilation.jit(lambda x: x + 1)(1) == 2
    finally:
        compilation._cpu_settings.cache_clear()
