"""`describe` prints what other programs rely on, and refuses mistakes in one line."""

import csv
import io

import pytest

from experiments import description, registry
from tests.experiments.commands import ROOT, run_command

TABLE6 = ROOT / "tests" / "data" / "table6_main_configs.csv"


def test_csv_has_the_documented_header_and_plain_numbers():
    text = description.to_csv(registry.get("main_556m", "paper"))
    assert text.splitlines()[0] == (
        "experiment,run,architecture,n_act,K,A,L,layers,total_params,active_params,"
        "flops_per_token,phi_ratio,train_flops,tokens,steps,exposure"
    )
    rows = list(csv.DictReader(io.StringIO(text)))
    names = ["dense", "mod", "moe_8_64", "xmod_a4k8", "moe_8_128", "xmod_a3k16"]
    assert [row["run"] for row in rows] == names
    for row in rows:
        numbers = {key: float(row[key]) for key in list(row)[3:]}
        assert numbers["train_flops"] == pytest.approx(
            numbers["flops_per_token"] * numbers["tokens"]
        )
        assert numbers["exposure"] == pytest.approx(1 / numbers["phi_ratio"])
        assert numbers["n_act"] == numbers["active_params"] == float(rows[0]["total_params"])


@pytest.mark.parametrize("size", ["556M", "936M", "1.65B"])
def test_main_comparison_reproduces_table6(size):
    experiment = f"main_{size.replace('1.65B', '1650M').lower()}"
    runs = {run.name: description.row(run) for run in registry.get(experiment, "paper").runs}
    with TABLE6.open() as file:
        published = [row for row in csv.DictReader(file) if row["n_act"] == size]
    compared = [row for row in published if row["model"] in runs]
    assert len(compared) == len(runs) == 6
    for row in compared:
        ours = runs[row["model"]]
        assert ours["layers"] == int(row["layers"])
        digits = row["flops_per_token"]
        assert f"{ours['flops_per_token']:.1e}" == f"{float(digits):.1e}"
        assert float(row["train_flops"]) == pytest.approx(ours["train_flops"], rel=1e-3)


def test_table_has_a_line_for_every_run():
    result = run_command("describe", "--experiment=k_sweep_32k", "--scale=mini")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert lines[0].split()[:3] == ["run", "L", "layers"]
    names = [run.name for run in registry.get("k_sweep_32k", "mini").runs]
    assert [line.split()[0] for line in lines[1:]] == names


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--experiment=nonsense"], "unknown experiment 'nonsense'"),
        (["--experiment=main_556m", "--scale=huge"], "unknown --scale=huge"),
        (["--experiment=main_556m", "--format=yaml"], "format"),
        (["--experiment=main_556m", "--seed=-1"], "--seed=-1"),
        ([], "--experiment is missing"),
    ],
)
def test_mistakes_are_one_line_and_status_2(arguments, told):
    result = run_command("describe", *arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert told in result.stderr and result.stderr.count("\n") == 1
