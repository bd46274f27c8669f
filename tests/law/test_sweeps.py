import dataclasses
import math

import pytest

from experiments import registry
from tests.law.sweep_directories import MINI_LAW, SWEEPS, write_run, write_sweeps
from xmod_jax import records, storage
from xmod_jax.config import DataConfig
from xmod_jax.errors import UserError
from xmod_jax.law.fit import fit
from xmod_jax.law.observations import Table, observe
from xmod_jax.law.sweeps import Loss, collect


def _runs(name="k_sweep_2k"):
    return registry.get(name, "mini").runs


def _refusal(action):
    with pytest.raises(UserError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sweep_directories_give_the_law_that_made_them(tmp_path):
    collected = collect(write_sweeps(tmp_path))
    assert any("count once" in note for note in collected.notes)
    table = Table.of(observe(collected.rows))
    assert set(table.A) == {0.5, 1, 2, 3, 4, 5}
    found = fit(table)
    assert found.quality.rmse < 1e-6
    for name, value in dataclasses.asdict(MINI_LAW).items():
        assert getattr(found.law, name) == pytest.approx(value, rel=1e-3)


def test_the_chosen_loss_is_read(tmp_path):
    (path,) = write_sweeps(tmp_path, SWEEPS[:1])
    deltas = {
        loss: {o.row.source: o.delta for o in observe(collect([path], loss).rows)} for loss in Loss
    }
    assert len(deltas[Loss.TOPK]) == len(_runs()) - 1
    for source, delta in deltas[Loss.CALIBRATED].items():
        assert deltas[Loss.THRESHOLD][source] == pytest.approx(delta + 0.05)
        assert deltas[Loss.TOPK][source] == pytest.approx(delta - 0.02)


def test_seeds_become_their_mean_and_other_differences_stay_duplicates(tmp_path):
    dense, sparse = _runs()[:2]
    write_run(tmp_path / "dense", dense)
    for seed, shift in ((0, 0.0), (1, 0.04)):
        train = dataclasses.replace(sparse.train, seed=seed)
        write_run(tmp_path / f"s{seed}", dataclasses.replace(sparse, train=train), shift=shift)
    collected = collect([tmp_path])
    assert any("mean over seeds" in note for note in collected.notes)
    alone = collect([tmp_path / "dense", tmp_path / "s0"])
    both, one = observe(collected.rows)[0], observe(alone.rows)[0]
    assert both.delta == pytest.approx(one.delta + 0.02)
    train = dataclasses.replace(sparse.train, alignment=0.5)
    write_run(tmp_path / "tuned", dataclasses.replace(sparse, train=train))
    message = _refusal(lambda: observe(collect([tmp_path]).rows))
    assert "duplicated" in message and "tuned" in message


def test_dense_runs_of_two_recipes_are_never_averaged(tmp_path):
    dense, sparse = _runs()[:2]
    tuned = dataclasses.replace(dense.train, alignment=0.5)
    for name, run in (
        ("dense", dense),
        ("sparse", sparse),
        ("tuned", dataclasses.replace(dense, train=tuned)),
    ):
        write_run(tmp_path / name, run)
    message = _refusal(lambda: collect([tmp_path]))
    assert "no seeds of one training" in message
    assert f"{tmp_path}/dense = {tmp_path}/tuned" in message


def test_unfinished_and_other_architectures_are_left_out_with_a_note(tmp_path):
    dense, *others = _runs("main_556m")
    write_run(tmp_path / "dense", dense)
    for config in others:
        write_run(tmp_path / config.name, config)
    records.prepare(tmp_path / "unfinished", _runs()[1])
    records.prepare(tmp_path / "failed", _runs()[2])
    records.mark_failed(tmp_path / "failed", "loss is not finite at step 3")
    collected = collect([tmp_path])
    xmod = [config for config in others if config.architecture == "xmod"]
    assert len(collected.rows) == 1 + len(xmod)
    assert "left out 2 runs that are not finished" in collected.notes
    assert any("mod" in note and "does not describe" in note for note in collected.notes)


def test_nothing_finished_or_nothing_there_is_refused(tmp_path):
    records.prepare(tmp_path / "a", _runs()[0])
    assert "no finished dense or X-MoD run" in _refusal(lambda: collect([tmp_path]))
    assert "no such folder" in _refusal(lambda: collect([tmp_path / "none"]))


def test_losses_of_different_scales_or_data_are_not_compared(tmp_path):
    dense, sparse = _runs()[:2]
    write_run(tmp_path / "dense", dense)
    write_run(tmp_path / "paper", dataclasses.replace(sparse, scale="paper"))
    message = _refusal(lambda: collect([tmp_path]))
    assert f"mix scales (mini in {tmp_path}/dense, paper in {tmp_path}/paper)" in message
    known, again = DataConfig("prep", "a" * 16), DataConfig("prep", "b" * 16)
    for folder, other in (("named", DataConfig("other")), ("anew", again)):
        write_run(tmp_path / folder / "dense", dataclasses.replace(dense, data=known))
        write_run(tmp_path / folder / "sparse", dataclasses.replace(sparse, data=other))
        message = _refusal(lambda folder=folder: collect([tmp_path / folder]))
        assert f"mix data ({'a' * 16} in" in message and f"{other.content} in" in message


def test_a_training_executed_in_two_ways_counts_once(tmp_path):
    dense, sparse = _runs()[:2]
    how = dataclasses.replace(sparse.execution, keep_products=True, checkpoint_every=1)
    write_run(tmp_path / "dense", dense)
    write_run(tmp_path / "one", sparse)
    write_run(tmp_path / "two", dataclasses.replace(sparse, execution=how))
    moved = dataclasses.replace(sparse, data=DataConfig("embedded=1", dense.data.hash))
    assert moved.data.content == "embedded=1"  # not looked at: its name stands for it
    collected = collect([tmp_path])
    assert len(collected.rows) == 2
    assert "1 runs stand in several sweeps and count once" in collected.notes


def test_a_missing_loss_names_the_run(tmp_path):
    dense = _runs()[0]
    records.prepare(tmp_path / "old", dense)
    record = {"step": 1, "flops": 1e9, "tokens": 10, "loss_topk": 2.0, "loss_threshold": 2.0}
    storage.append(tmp_path / "old" / records.EVAL, record)
    records.mark_done(tmp_path / "old", record)
    message = _refusal(lambda: collect([tmp_path]))
    assert "old" in message and "loss_calibrated" in message


def test_deltas_are_finite(tmp_path):
    (path,) = write_sweeps(tmp_path, SWEEPS[:1])
    assert all(math.isfinite(o.delta) for o in observe(collect([path]).rows))
