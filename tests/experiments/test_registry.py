"""Every experiment is defined at both scales, matched in FLOPs, with the paper's grids."""

import pytest

from experiments import registry, scales
from experiments.anchor_sweep import anchor_sweep
from experiments.scales import published_compute
from xmod_jax import accounting
from xmod_jax.errors import UserError
from xmod_jax.identity import config_hash

EXPERIMENTS = [f"k_sweep_{length}k" for length in (2, 4, 8, 16, 32, 64)] + [
    "scale_sweep_32k",
    "scale_sweep_32k_1650m",
    "anchor_sweep_32k",
    "main_556m",
    "main_936m",
    "main_1650m",
    "mechanism_controls",
    "ablations",
    "deep_sweep",
    "pilot_32k",
    "lr_sweep",
    "alignment_sweep",
]
SCALES = ("mini", "paper")


def paper_flops(run):
    train = run.train
    return accounting.training_flops(run.model, train.context_length, train.tokens)


def names_of(experiment, scale):
    return [run.name for run in registry.get(experiment, scale).runs]


def test_the_registry_knows_exactly_these_experiments():
    assert sorted(registry.names()) == sorted(EXPERIMENTS)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_runs_are_matched_in_flops_and_covered_by_their_dense_reference(name, scale):
    experiment = registry.get(name, scale)
    assert experiment.runs[0].architecture == "dense"
    dense = {(run.family, run.train.context_length): run for run in experiment.runs[::-1]}
    for run in experiment.runs:
        assert (run.experiment, run.scale) == (name, scale)
        reference = dense[run.family, run.train.context_length]
        assert reference.architecture == "dense"
        assert accounting.n_act(run.model) == accounting.n_act(reference.model)
        assert run.model.backbone == reference.model.backbone
        assert paper_flops(run) <= paper_flops(reference)
        assert paper_flops(run) == pytest.approx(paper_flops(reference), rel=0.016)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_runs_of_an_experiment_are_different_computations(name, scale):
    runs = registry.get(name, scale).runs
    assert len({config_hash(run) for run in runs}) == len({run.name for run in runs}) == len(runs)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_mini_runs_have_the_hierarchies_of_paper_runs(name):
    paper = {run.architecture: run for run in registry.get(name, "paper").runs}
    for run in registry.get(name, "mini").runs:
        assert run.architecture in paper
        assert run.train.context_length >= 2 * run.model.hierarchy.sparsity


@pytest.mark.parametrize("length", [2, 4, 8, 16, 32])
def test_k_sweep_grid(length):
    grid = [2, *([3] if length == 2 else []), *range(4, 21, 2)]
    expected = ["dense", *(f"xmod_a1k{k}" for k in grid)]
    runs = registry.get(f"k_sweep_{length}k", "paper").runs
    assert [run.name for run in runs] == expected
    assert {run.train.context_length for run in runs} == {1024 * length}
    assert {run.train.tokens_per_step for run in runs} == {5 * 2**19}


def test_out_of_range_grids_are_experiments_of_their_own():
    k = [16, 18, 20, 22, 24]
    assert names_of("k_sweep_64k", "paper") == ["dense", *(f"xmod_a1k{k}" for k in k)]
    assert names_of("scale_sweep_32k_1650m", "paper") == [
        "dense_1650m",
        *(f"xmod_a1k{k}_1650m" for k in (14, 16, 18, 20)),
    ]
    families = {run.family for run in registry.get("scale_sweep_32k", "paper").runs}
    assert families == {"165M", "298M", "556M", "936M"}


@pytest.mark.parametrize("scale", SCALES)
def test_anchor_sweep_has_every_stride_and_sparsity(scale):
    experiment = registry.get("anchor_sweep_32k", scale)
    strides = ("0.5", "1", "2", "3", "4", "5")
    names = [f"xmod_a{a}k{k}" for a in strides for k in (4, 8, 12, 16)]
    assert [run.name for run in experiment.runs] == ["dense", *names]
    assert experiment.skipped == ()


def test_a_pair_that_the_depth_cannot_hold_is_skipped_visibly():
    experiment = anchor_sweep("anchor_sweep_32k", scales.MINI)
    assert len(experiment.runs) + len(experiment.skipped) == 25
    assert all(line.startswith("xmod_a0.5k") for line in experiment.skipped)
    assert "cannot be met" in experiment.skipped[0]


def test_main_comparison_rows():
    runs = registry.get("main_556m", "paper").runs
    names = ["dense", "mod", "moe_8_64", "xmod_a4k8", "moe_8_128", "xmod_a3k16"]
    assert [run.name for run in runs] == names
    assert [run.model.hierarchy.depth for run in runs] == [28, 49, 28, 161, 28, 298]
    kinds = ["dense", "mod", "moe", "xmod", "moe", "xmod"]
    assert [run.architecture for run in runs] == kinds
    experts = [(m.active, m.experts, m.shared, m.d_expert) for r in runs if (m := r.model.moe)]
    assert experts == [(6, 64, 2, 384), (6, 128, 2, 384)]


def test_the_deep_sweep_reaches_412_layers_at_its_own_compute():
    runs = registry.get("deep_sweep", "paper").runs
    assert [run.name for run in runs] == ["deep_dense", *(f"deep_a1k{k}" for k in (4, 8, 12, 16))]
    assert [run.model.hierarchy.depth for run in runs] == [52, 124, 220, 316, 412]
    assert paper_flops(runs[0]) == pytest.approx(4e19, rel=1e-3)


@pytest.mark.parametrize("scale", SCALES)
def test_every_ablation_takes_one_part_away(scale):
    whole, *parts = registry.get("ablations", scale).runs[1:]
    layers = whole.model.hierarchy
    by_name = {run.name.removeprefix("without_"): run.model for run in parts}
    anchors = by_name["dense_anchors"].hierarchy
    assert anchors.dense_layers == anchors.prefix == layers.prefix
    assert by_name["dense_prefix"].hierarchy.prefix == 0
    assert by_name["token_choice_bias"].routing.bias_scale == 0
    assert by_name["gated_residual_scaling"].routing.update == "mod"
    for model in by_name.values():
        assert model.hierarchy.active_depth == layers.active_depth


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("layers", "leads"), [("a4k8", 4), ("a3k16", 3)])
def test_both_models_of_the_main_comparison_have_both_controls(scale, layers, leads):
    runs = {run.name: run for run in registry.get("mechanism_controls", scale).runs}
    xmod, ffn = runs[f"xmod_{layers}"], runs[f"routed_ffn_{layers}"]
    queries = runs[f"selected_q_full_kv_{layers}"]
    assert ffn.model.routing.sparse == "ffn" and queries.model.routing.sparse == "full_kv"
    assert ffn.model.hierarchy.groups[-1].attentions == leads
    assert queries.model.hierarchy == xmod.model.hierarchy
    for control in (ffn, queries):
        assert control.model.hierarchy.sparsity == xmod.model.hierarchy.sparsity
        assert control.model.hierarchy.anchor_stride == xmod.model.hierarchy.anchor_stride
    main = registry.get("main_936m", scale).run(xmod.name)
    assert main.model == xmod.model and main.train == xmod.train


@pytest.mark.parametrize("scale", SCALES)
def test_the_pilot_is_the_anchor_sweep_and_twelve_moe_runs(scale):
    pilot, anchors = registry.get("pilot_32k", scale), registry.get("anchor_sweep_32k", scale)
    assert [config_hash(r) for r in pilot.runs[:25]] == [config_hash(r) for r in anchors.runs]
    moe = {run.model.moe for run in pilot.runs[25:]} - {None}
    assert len(moe) == 12
    assert {(m.active + m.shared, m.shared) for m in moe if m} == {(2, 0), (4, 0), (8, 0), (8, 2)}


def test_recipe_sweeps_have_the_papers_grids():
    rates = [run.train.optimizer for run in registry.get("lr_sweep", "paper").runs]
    for kind in ("muon", "adamw"):
        got = [o.peak_lr for o in rates if o.matrices == kind]
        assert got == pytest.approx([2**p * 1e-4 for p in range(8)])
    runs = registry.get("alignment_sweep", "paper").runs[1:]
    assert [r.train.alignment for r in runs] == pytest.approx([1e-2, 1e-3, 1e-4, 1e-5])


@pytest.mark.parametrize(
    ("name", "compute"), [("main_556m", 1e20), ("main_936m", 1.5e20), ("main_1650m", 2.5e20)]
)
def test_main_comparison_spends_the_published_compute(name, compute):
    for run in registry.get(name, "paper").runs:
        assert paper_flops(run) == pytest.approx(compute, rel=1e-3)


def test_compute_follows_the_published_points_and_grows_between_them():
    sizes = [161.6e6, 291.9e6, 543.3e6, 914.1e6, 1615.1e6]
    computes = [published_compute(size) for size in sizes]
    assert computes == pytest.approx([3e19, 5.4e19, 1e20, 1.5e20, 2.5e20], rel=2e-3)
    assert published_compute(1e8) < 3e19 and published_compute(4e9) > 2.5e20


def test_mini_contexts_are_different_and_hold_a_sparse_layer():
    lengths = [scales.MINI.context(1024 * 2**power) for power in range(1, 7)]
    assert lengths == [32, 48, 96, 160, 256, 432]


def test_unknown_names_are_one_line_that_lists_the_known_ones():
    experiment = registry.get("main_556m", "mini")
    for call, known in [
        (lambda: registry.get("nonsense", "mini"), "k_sweep_32k"),
        (lambda: registry.get("main_556m", "huge"), "mini, paper"),
        (lambda: experiment.run("xmod_a9k9"), "xmod_a4k8"),
        (lambda: experiment.select(["dense", "xmod_a9k9"]), "xmod_a4k8"),
    ]:
        with pytest.raises(UserError, match=known) as refusal:
            call()
        assert "\n" not in str(refusal.value)


def test_select_keeps_the_order_of_the_experiment():
    experiment = registry.get("main_556m", "mini")
    assert [r.name for r in experiment.select(["xmod_a4k8", "dense"])] == ["dense", "xmod_a4k8"]
    assert experiment.select([]) == experiment.runs


def test_override_changes_seed_and_data_of_every_run():
    experiment = registry.get("main_556m", "mini").override(seed=7, data="somewhere")
    assert {(run.train.seed, run.data.source) for run in experiment.runs} == {(7, "somewhere")}
    assert experiment.override() == experiment
    kept = registry.get("main_556m", "mini").override(keep_products=True)
    assert all(run.execution.keep_products for run in kept.runs)


def test_seeds_stand_one_after_another_and_are_found_by_the_runs_name():
    plain = registry.get("main_556m", "mini")
    experiment = plain.override(seed=3, seeds=2)
    assert [(run.name, run.train.seed) for run in experiment.runs] == [
        (run.name, seed) for run in plain.runs for seed in (3, 4)
    ]
    assert [run.folder for run in experiment.select(["dense"])] == ["dense", "dense_seed4"]
    assert experiment.run("dense").train.seed == 3
    with pytest.raises(UserError, match="2 seeds from 4294967295 on go beyond 4294967295"):
        plain.override(seed=2**32 - 1, seeds=2)


@pytest.mark.parametrize("factor", [0.1, 0.5, 2.0, 3.7, 10.0])
def test_a_budget_multiplies_the_compute_and_keeps_it_matched(factor):
    for name in ("k_sweep_2k", "main_556m"):
        plain = registry.get(name, "mini")
        experiment = plain.override(budget=factor)
        flops = lambda run: accounting.training_flops(
            run.model, run.train.context_length, run.train.tokens
        )
        dense = flops(experiment.run("dense"))
        for before, run in zip(plain.runs, experiment.runs, strict=True):
            one_step = flops(run) / run.train.steps
            assert abs(flops(run) - factor * flops(before)) <= one_step * (1 + 1e-9)
            assert flops(run) <= dense and dense - flops(run) <= (2 + factor) * one_step * 1.1
            assert config_hash(run) != config_hash(before)
            assert run.execution.eval_every <= run.train.steps
    assert plain.override(budget=1.0) == plain
    with pytest.raises(UserError, match=r"--budget=0.0001 leaves"):
        plain.override(budget=0.0001)


def test_a_name_is_defined_once():
    with pytest.raises(ValueError, match="defined twice"):
        registry.register(registry.names()[0])(lambda scale: registry.get("main_556m", scale))
