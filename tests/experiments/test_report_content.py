"""The page over whatever sweeps there are: odd names, odd losses, parts that are missing."""

from __future__ import annotations

import dataclasses
import html
import json
import pathlib
import re
import warnings

import pytest

from experiments import registry, report_content, runner
from experiments import report_data as data
from tests.law.sweep_directories import write_run
from xmod_jax import records, storage
from xmod_jax.diagnostics import Diagnostics, Intervals, independent_subsets

# How a machine writes what is not there, and large numbers.
MACHINE = re.compile(r"\bnan\b|\bNone\b|\binf\b|\d[eE]\+\d", re.IGNORECASE)
CODE = '<script>alert(1)</script>$\\frac{1}{$ #aabbcc id="x" url(#a) --> <!-- 漢\x00\n'


def _sweep(folder, name="k_sweep_32k", seed=0, only=()):
    experiment = registry.get(name, "mini").override(seed=seed)
    runner.write_sweep(experiment, folder)
    for config in experiment.select(only):
        write_run(folder / config.name, config, shift=0.01 * seed)
    return folder


def _final(folder, *names, **changes):
    """Changes the last evaluation of runs, of all of them where none is named."""
    for path in folder.glob("*/" + records.DONE):
        if path.parent.name in names or not names:
            final = json.loads(path.read_text())["final"]
            path.write_text(json.dumps({"final": final | changes}))


def _rename(directory, name):
    path = directory / records.CONFIG
    stored = json.loads(path.read_text())
    stored["config"]["name"] = name
    path.write_text(json.dumps(stored))


def _train(directory, *steps):
    for number, (tokens, loss) in enumerate(steps, 1):
        storage.append(directory / records.TRAIN, {"step": number, "tokens": tokens, "loss": loss})


def _one_run(root):
    _sweep(root / "w", only=["xmod_a1k4"])
    return [root / "w" / "xmod_a1k4"]


def _failed_and_unfinished(root):
    folder = _sweep(root / "w", only=["dense", "xmod_a1k2"])
    for name in ("xmod_a1k4", "xmod_a1k8"):
        config = registry.get("k_sweep_32k", "mini").run(name)
        records.prepare(folder / name, config)
    records.mark_failed(folder / "xmod_a1k4", "loss <b>diverged</b>")
    _train(folder / "xmod_a1k8", (10, 3.0), (20, None))
    return [folder]


def _no_dense(root):
    return [_sweep(root / "w", only=["xmod_a1k2", "xmod_a1k8"])]


def _only_dense(root):
    return [_sweep(root / "w", only=["dense"])]


def _one_k(root):
    return [_sweep(root / "w", only=["dense", "xmod_a1k8"])]


def _unequal_seeds(root):
    return [
        _sweep(root / "a"),
        _sweep(root / "b", seed=1, only=["xmod_a1k8"]),
        _sweep(root / "c", seed=2, only=["dense", "xmod_a1k8"]),
    ]


def _absent_numbers(root):
    folder = _sweep(root / "w")
    _final(folder, coverage=None, jaccard=None, agreement=None, hardware_flops=None)
    _train(folder / "dense", (10, 3.0), (None, 2.9), (30, None), (40, 2.8))
    _train(folder / "xmod_a1k2", (10, None), (20, None))
    return [folder]


def _code_as_names(root):
    folder = _sweep(root / "w", "main_556m")
    for name in ("mod", "moe_8_64"):
        _rename(folder / name, CODE)
        _train(folder / name, (10, 3.0), (20, 2.0))
    _rename(folder / "xmod_a4k8", "_hidden")
    return [folder]


def _long_names(root):
    folder = _sweep(root / "w", "main_556m")
    for name in ("mod", "xmod_a4k8"):
        _rename(folder / name, name + "_very_long" * 30)
    return [folder]


def _equal_losses(root):
    folder = _sweep(root / "w")
    _final(folder, loss_calibrated=2.5)
    return [folder]


def _one_diverged(root):
    folder = _sweep(root / "w")
    _final(folder, "xmod_a1k8", loss_calibrated=1e30, loss_threshold=1e30, loss_topk=9e4)
    return [folder]


def _large_counts(root):
    folder = _sweep(root / "w")
    _final(folder, loss_calibrated=3e9, loss_topk=1e12, tokens=1.88e18, flops=2.8e30)
    return [folder]


def _two_contexts(root):
    return [_sweep(root / "a", "k_sweep_2k"), _sweep(root / "b", "k_sweep_32k")]


def _two_hundred_runs(root):
    base = registry.get("k_sweep_32k", "mini").run("xmod_a1k8")
    for number in range(200):
        train = dataclasses.replace(base.train, alignment=0.001 * (number + 1))
        config = dataclasses.replace(base, name=f"run_{number:03d}", train=train)
        write_run(root / "w" / config.name, config)
        _train(root / "w" / config.name, (10, 3.0), (20, 2.5))
    return [root / "w"]


CASES = {
    _one_run: ["1 of 1 finished"],
    _failed_and_unfinished: ["xmod_a1k4: failed: loss <b>diverged</b>", "unfinished, step 2 of"],
    _no_dense: ["xmod_a1k2", "2 of 5 finished"],
    _only_dense: ["1 of 5 finished"],
    _one_k: ["Loss against total parameters"],
    _unequal_seeds: [
        "xmod_a1k8: minus dense over 2 of 3 seeds",
        "2.3799 ± 0.0100",
        "standard error over seeds",
    ],
    _absent_numbers: ["Training loss"],
    _code_as_names: ["<script>alert(1)</script>", "_hidden", "X-MoD"],
    _long_names: ["mod" + "_very_long" * 30, "…"],
    _equal_losses: ["+0.0000"],
    _one_diverged: ["1e30", "1 above the figure, up to 1e30"],
    _large_counts: ["1.88e18", "2.8e30", "3e9"],
    _two_contexts: ["All sweeps together", "32", "256"],
    _two_hundred_runs: ["200 of 200 finished", "run_199"],
}


def _page(folders):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return report_content.build(data.load([str(folder) for folder in folders]))


def _text(page):
    return html.unescape(re.sub(r"<[^>]*>", " ", page[page.index("<body>") :]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_whatever_ran_makes_a_page_that_people_can_read(case, tmp_path):
    page = _page(case(tmp_path))
    text = _text(page)
    assert not MACHINE.findall(text.replace(str(tmp_path), ""))
    for part in CASES[case]:
        assert part in text, part
    for tag in ("<script", "<b>", "<!--", "<img", "<link"):
        assert tag not in page
    assert len(page) < 2_000_000


def test_the_page_does_not_depend_on_where_it_is_written(tmp_path):
    folders = _unequal_seeds(tmp_path)
    page = _page(folders)
    assert page == _page(folders)
    references = re.findall(r"(?:\bsrc=|\bhref=|\burl\()[\"']?(.)", page)
    assert references and set(references) == {"#"}


def test_of_many_diagnosed_runs_the_first_are_drawn_and_all_are_in_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(report_content, "_DRAWN", 2)
    folder = _sweep(tmp_path / "w")
    updates = tuple(int(1e6 * share) for share in independent_subsets(8, 8).updates)
    passes = (Intervals(8, 2, 0.6, 0.1, updates),)
    for k in (2, 4, 8, 16):
        record = Diagnostics(8, 8, passes, passes, 0.9).record()
        storage.write_json(folder / f"xmod_a1k{k}" / "diagnostics.json", record)
    page = _page([folder])
    assert len(set(re.findall(r"<title>Updates of a token: (\w+)", page))) == 2
    assert page.count('<th scope="row">xmod_a1k16</th>') == 4  # results, models, two thresholds
    assert "Figures of the first 2 runs; the table has all 4." in _text(page)


def test_figures_and_tables_have_names_for_keyboard_and_screen_reader(tmp_path):
    page = _page([_sweep(tmp_path / "w")])
    for figure in re.findall(r"<figure.*?</figure>", page, re.DOTALL):
        caption = re.search(r"<figcaption id=\"([^\"]+)\">([^<]+)", figure)
        assert caption is not None and f'aria-labelledby="{caption[1]}"' in figure
        assert 'tabindex="0"' in figure and f"<title>{caption[2]}</title>" in figure
        assert f'role="img" aria-label="{caption[2]}"' in figure
    frames = re.findall(r'<div class="scroll"([^>]*)>', page)
    assert len(frames) == 2
    for frame in frames:
        assert 'tabindex="0"' in frame and 'role="region"' in frame and "aria-label=" in frame
    assert page.count("scrolls sideways") == len(frames)


def test_a_name_with_the_look_of_a_colour_or_an_id_is_left_as_it_is(tmp_path):
    (folder,) = _code_as_names(tmp_path)
    name = '#aabbcc id="x" url(#a)'
    _rename(folder / "mod", name)
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", _page([folder]))
    assert name in map(html.unescape, labels)


def test_runs_by_other_names_stand_in_the_order_of_their_numbers(tmp_path):
    base = registry.get("k_sweep_32k", "mini").run("xmod_a1k8")
    for number in (10, 9, 100):
        train = dataclasses.replace(base.train, alignment=0.001 * number)
        config = dataclasses.replace(base, name=f"mine_{number}", train=train)
        write_run(pathlib.Path(tmp_path) / config.name, config)
    (sweep,) = data.load([str(tmp_path)])
    assert [c.name for c in sweep.configurations] == ["mine_9", "mine_10", "mine_100"]


def test_tables_of_many_seeds_fit_a_window_of_1280_pixels(tmp_path):
    folders = [_sweep(tmp_path / f"w{seed}", "mechanism_controls", seed) for seed in range(5)]
    for seed, folder in enumerate(folders):
        _final(folder, coverage=0.9 + 0.001 * seed, jaccard=0.1 + 0.001 * seed)
    page = _page(folders)
    tables = re.findall(r"<table>(.*?)</table>", page, re.DOTALL)
    assert len(tables) == 2
    for table in tables:
        rows = [re.findall(r"<t[hd]([^>]*)>([^<]*)</t[hd]>", row) for row in table.split("</tr>")]
        # Long cells are broken; of a header, its longest word stays whole.
        widths = [
            max(20 if "long" in kind else len(cell) for kind, cell in column)
            for column in zip(*(row for row in rows[1:] if row), strict=True)
        ]
        # In Chromium: 7.6 pixels a character, 21 of padding, 1141 for the table.
        assert sum(7.6 * width + 21 for width in widths) < 1141
