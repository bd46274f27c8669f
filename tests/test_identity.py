"""Two runs are the same training when they compute the same, and only then."""

# Callers in Python may pass values of other types; here they do.
# mypy: disable-error-code="arg-type"

import dataclasses
import json
import shutil

import numpy as np
import pytest

from xmod_jax import accounting, records
from xmod_jax.config import (
    Backbone,
    Compute,
    DataConfig,
    Execution,
    ModelConfig,
    MoE,
    OptimizerConfig,
    Routing,
    RunConfig,
    Scores,
    SparseStart,
    Start,
    TrainConfig,
    Update,
    from_dict,
    to_dict,
)
from xmod_jax.errors import UserError
from xmod_jax.hierarchy import Hierarchy, StageGroup
from xmod_jax.identity import config_hash, difference, first_hash, seedless_hash

MODEL = ModelConfig(
    Backbone(16, 4, 4, 2, 24, vocab_size=31), Hierarchy.from_name("A1K4", active_depth=6, prefix=2)
)
DATA = DataConfig("prep", "0123456789abcdef")
CONFIG = RunConfig(
    "k_sweep", "xmod_a1k4", "xmod", "tiny", "mini", MODEL, TrainConfig(32, 4, steps=8), DATA
)
EXPERTS = dataclasses.replace(
    CONFIG,
    model=dataclasses.replace(MODEL, hierarchy=Hierarchy.dense(2), moe=MoE(6, 2, 1, 5)),
)
OTHERWISE = {
    "accumulation": 2,
    "keep_products": True,
    "eval_every": 3,
    "checkpoint_every": 3,
    "keep_checkpoints": 5,
}


def executed(config, **how):
    return dataclasses.replace(config, execution=dataclasses.replace(config.execution, **how))


def trained(config, **what):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **what))


def test_the_hash_of_a_run_stays_from_version_to_version():
    """Folders of runs are bound by it: it may change only with config.json's format."""
    assert config_hash(CONFIG) == "675e43ac42473bcf"
    assert config_hash(EXPERTS) == "57253c35a3aa49a9"
    softmax = dataclasses.replace(EXPERTS.model, moe=MoE(6, 2, 1, 5, scores=Scores.SOFTMAX))
    assert from_dict(ModelConfig, to_dict(softmax)) == softmax != EXPERTS.model


@pytest.mark.parametrize("how", OTHERWISE)
def test_how_a_run_is_executed_is_recorded_but_no_part_of_its_hash(how, tmp_path):
    other = executed(CONFIG, **{how: OTHERWISE[how]})
    assert other != CONFIG and config_hash(other) == config_hash(CONFIG)
    records.prepare(tmp_path, CONFIG)
    records.prepare(tmp_path, other)  # it resumes with the other value
    run = records.RunRecord.load(tmp_path)
    assert run.config == other
    assert run.accounting == accounting.summary(MODEL, 32, other.execution.keep_products)


def test_every_field_of_the_execution_is_tried():
    assert set(OTHERWISE) == {field.name for field in dataclasses.fields(Execution)}


@pytest.mark.parametrize(("balance", "same"), [(1e-3, False), (0.0, True)])
def test_micro_batches_are_part_of_a_run_whose_experts_balance_by_them(balance, same):
    moe = dataclasses.replace(EXPERTS.model, moe=MoE(6, 2, 1, 5, balance=balance))
    config = dataclasses.replace(EXPERTS, model=moe)
    assert (config_hash(executed(config, accumulation=2)) == config_hash(config)) is same
    assert config_hash(executed(config, keep_products=True)) == config_hash(config)


@pytest.mark.parametrize(
    "change",
    [
        dict(train=dataclasses.replace(CONFIG.train, seed=1)),
        dict(train=dataclasses.replace(CONFIG.train, steps=9)),
        dict(train=dataclasses.replace(CONFIG.train, eval_sequences=9)),
        dict(train=dataclasses.replace(CONFIG.train, optimizer=OptimizerConfig(clip=0.5))),
        dict(model=dataclasses.replace(MODEL, compute=Compute.BFLOAT16)),
        dict(data=DataConfig("prep", "fedcba9876543210")),
        dict(start=Start("there", "0123")),
    ],
)
def test_what_is_computed_is_the_hash(change):
    assert config_hash(dataclasses.replace(CONFIG, **change)) != config_hash(CONFIG)


def test_labels_and_places_are_no_part_of_the_hash():
    labels = dict(experiment="another", name="other", family="big", scale="paper")
    assert config_hash(dataclasses.replace(CONFIG, **labels)) == config_hash(CONFIG)
    for spelling in ("prep/", "./prep", "/moved/there", "prep=1"):
        moved = dataclasses.replace(CONFIG, data=DataConfig(spelling, DATA.hash))
        assert config_hash(moved) == config_hash(CONFIG)
    start, elsewhere = (Start(d, "0123", 4, SparseStart.COPIED) for d in ("there", "moved"))
    started = dataclasses.replace(CONFIG, start=start)
    assert config_hash(started) == config_hash(dataclasses.replace(CONFIG, start=elsewhere))
    assert seedless_hash(trained(CONFIG, seed=3)) == config_hash(CONFIG)


@pytest.mark.parametrize(
    ("spelled", "plain"),
    [
        (Routing(bias_scale=1), Routing(bias_scale=1.0)),
        (Routing(bias_scale=np.float32(0.5)), Routing(bias_scale=0.5)),
        (Routing(bias_scale=-0.0), Routing(bias_scale=0.0)),
        (Routing(update="mod"), Routing(update=Update.MOD)),
        (TrainConfig(32.0, np.int64(4), 8), TrainConfig(32, 4, 8)),
        (OptimizerConfig(weight_decay=0), OptimizerConfig(weight_decay=0.0)),
        (OptimizerConfig(peak_lr=np.float64(1e-2)), OptimizerConfig(peak_lr=0.01)),
        (Hierarchy(np.int32(2), [StageGroup(1, 3.0)], 4), Hierarchy(2, (StageGroup(1, 3),), 4)),
        (Backbone(16, 4, 4, 2, 24, rope_base=10_000), Backbone(16, 4, 4, 2, 24, rope_base=1e4)),
    ],
)
def test_equal_values_are_written_alike(spelled, plain):
    assert json.dumps(to_dict(spelled)) == json.dumps(to_dict(plain))
    assert spelled == plain and hash(spelled) == hash(plain)
    assert from_dict(type(plain), json.loads(json.dumps(to_dict(spelled)))) == plain


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainConfig(32, 4, 8.5), "TrainConfig.steps must be a whole number, got 8.5"),
        (lambda: TrainConfig(32, 4, "8"), "TrainConfig.steps must be a number, got '8'"),
        (lambda: TrainConfig(32, 4, True), "TrainConfig.steps must be a number, got True"),
        (lambda: TrainConfig(32, 4, 8, alignment=float("nan")), "alignment must be a finite"),
        (lambda: OptimizerConfig(weight_decay=float("nan")), "weight_decay must be a finite"),
        (lambda: OptimizerConfig(weight_decay=float("inf")), "weight_decay must be a finite"),
        (lambda: OptimizerConfig(clip=10**400), "clip is too large a number"),
        (lambda: Routing(update="sideways"), "'sideways' is not a valid Update"),
        (lambda: Execution(keep_products=1), "keep_products must be true or false, got 1"),
        (lambda: Hierarchy(2, "A1K4"), "Hierarchy.groups must be a sequence"),
        (lambda: ModelConfig(MODEL.backbone, "A1K4"), "hierarchy must be Hierarchy, got 'A1K4'"),
        (lambda: DataConfig(None), "DataConfig.source must be text, got None"),
        (lambda: executed(CONFIG, accumulation=3), "not a multiple of accumulation 3"),
    ],
)
def test_values_of_another_kind_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_other_data_under_the_same_path_are_another_run(tmp_path):
    records.prepare(tmp_path, CONFIG)
    again = dataclasses.replace(CONFIG, data=DataConfig("prep", "fedcba9876543210"))
    with pytest.raises(UserError, match=r"other data: prep with .*0123456789abcdef there.*fedcba"):
        records.prepare(tmp_path, again)
    # Nobody has looked at them yet: what is known agrees.
    records.check_same_run(tmp_path, dataclasses.replace(CONFIG, data=DataConfig("elsewhere")))
    assert difference(CONFIG, trained(again, seed=2)) is not None


def test_a_run_is_found_by_the_content_of_its_data_wherever_they_lie(tmp_path):
    records.prepare(tmp_path, CONFIG)
    records.prepare(tmp_path, dataclasses.replace(CONFIG, data=DataConfig("/new", DATA.hash)))
    assert records.RunRecord.load(tmp_path).config.data == DataConfig("/new", DATA.hash)


def test_labels_stay_those_of_whoever_made_the_directory(tmp_path):
    records.prepare(tmp_path, CONFIG)
    relabelled = dataclasses.replace(CONFIG, experiment="another")
    records.prepare(tmp_path, executed(relabelled, eval_every=2))
    run = records.RunRecord.load(tmp_path)
    assert run.config == executed(CONFIG, eval_every=2) and run.hash == config_hash(CONFIG)


def test_a_configuration_changed_by_hand_is_refused(tmp_path):
    records.prepare(tmp_path, CONFIG)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"steps": 8', '"steps": 80'))
    with pytest.raises(UserError, match=r"config\.json: its hash .* changed by hand"):
        records.RunRecord.load(tmp_path)
    with pytest.raises(UserError, match="changed by hand"):
        records.prepare(tmp_path, CONFIG)


def test_a_configuration_of_a_later_format_is_refused_in_a_line(tmp_path):
    records.prepare(tmp_path, CONFIG)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 3'))
    with pytest.raises(UserError, match="it is of format 3, this version reads 2"):
        records.RunRecord.load(tmp_path)


def first_format(directory, config, data_hash=None):
    """Leaves a run directory as versions before `Execution` did."""
    values = to_dict(config)
    values["train"] |= values.pop("execution")
    if not values["train"]["keep_products"]:
        del values["train"]["keep_products"]
    values["data"] = {"source": config.data.source}
    content = {"hash": first_hash(values), "config": values}
    content["accounting"] = accounting.summary(config.model, config.train.context_length)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(content))
    if data_hash:
        meta = directory / "checkpoints" / "8" / "meta" / "metadata"
        meta.parent.mkdir(parents=True)
        meta.write_text(json.dumps({"hash": content["hash"], "data": data_hash}))


@pytest.mark.parametrize("keep", [False, True])
def test_a_directory_of_the_first_format_is_read_and_goes_on(tmp_path, keep):
    config = executed(CONFIG, checkpoint_every=4, keep_products=keep)
    first_format(tmp_path / "run", config, DATA.hash)
    run = records.RunRecord.load(tmp_path / "run")
    assert run.config == config and run.hash == config_hash(CONFIG)
    records.prepare(tmp_path / "run", config)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["format"] == 2
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert records.RunRecord.load(tmp_path / "run").config == config
    with pytest.raises(UserError, match=r"train\.seed is 0 there, 5 here"):
        records.prepare(tmp_path / "run", trained(config, seed=5))


def test_other_data_are_no_continuation_of_a_directory_of_the_first_format(tmp_path):
    first_format(tmp_path / "run", CONFIG, "fedcba9876543210")
    with pytest.raises(UserError, match="other data"):
        records.prepare(tmp_path / "run", CONFIG)


def test_a_directory_of_the_first_format_without_checkpoint_has_data_of_unknown_content(tmp_path):
    first_format(tmp_path / "run", CONFIG)
    assert records.RunRecord.load(tmp_path / "run").config.data == DataConfig("prep")


def test_a_configuration_of_the_first_format_changed_by_hand_is_refused(tmp_path):
    started = dataclasses.replace(CONFIG, start=Start("there", "0123", 4))
    for name, config in {"run": CONFIG, "started": started}.items():
        first_format(tmp_path / name, config, DATA.hash)
    # As the versions that wrote this format named these runs.
    assert json.loads((tmp_path / "run/config.json").read_text())["hash"] == "f4aadd8e4d7e8401"
    path = tmp_path / "started" / "config.json"
    assert json.loads(path.read_text())["hash"] == "eaf67c8829ee1c34"
    moved = path.read_text().replace('"there"', '"moved"')
    path.write_text(moved)
    assert records.RunRecord.load(path.parent).config.start == Start("moved", "0123", 4)
    path.write_text(moved.replace('"seed": 0', '"seed": 5'))
    with pytest.raises(UserError, match=r"config\.json: its hash .* changed by hand"):
        records.RunRecord.load(path.parent)
