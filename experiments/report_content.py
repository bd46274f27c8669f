"""What stands in a report: for every sweep what ran, results, figures, how to rerun it."""

from __future__ import annotations

import itertools
import pathlib
import shlex
from collections.abc import Sequence

from experiments import (
    diagnostics_figure,
    report_diagnostics,
    report_law,
    report_page,
    series,
    tables,
)
from experiments import report_data as data
from experiments import report_figures as draw
from experiments.report_data import Configuration, Sweep
from experiments.report_page import Page
from experiments.spread import Spread
from xmod_jax import records
from xmod_jax.records import RunRecord, Status

RESULTS = (
    "run",
    "seeds",
    "loss",
    "- dense",
    "loss at 0.5",
    "top-k*",
    "coverage",
    "overlap",
)
MODELS = (
    "run",
    "architecture",
    "K",
    "A",
    "L",
    "N",
    "N_act",
    "N/N_act",
    "φ ratio",
    "tokens",
    "FLOPs",
    "config hash",
)
NOTE = (
    "loss: held out, calibrated threshold, nats per token (causal); - dense: minus the dense loss "
    "of the same seed at equal FLOPs; loss at 0.5: the paper's threshold (causal); * top-k looks "
    "at the whole sequence and is not causal, for reference only; coverage and overlap (Jaccard of "
    "adjacent sparse layers) under the calibrated threshold; ± one standard deviation over seeds."
)
MODELS_NOTE = (
    "L: context in tokens; N and N_act: parameters, all and active-equivalent; φ ratio: FLOPs of a "
    "token relative to dense; FLOPs: of the training, the paper's count (forward)."
)
UPDATES = (
    "Figures: how many sparse layers between two dense ones update a token; T: how many there are; "
    "diamonds and dashed steps: if each selected 1/K of the tokens independently. Table: "
    f"{report_diagnostics.NOTE}."
)
_DRAWN = 24  # most figures of update counts in a sweep
NOTHING = "No run is finished yet."


def build(sweeps: Sequence[Sweep], laws: Sequence[pathlib.Path] = ()) -> str:
    """The page of the sweeps, with the laws in the given files.

    Raises:
      UserError: a law or diagnostics file that cannot be read.
    """
    names = list(dict.fromkeys(sweep.experiment for sweep in sweeps))
    page = Page(
        f"Report: {', '.join(names)}" if len(names) < 4 else f"Report on {len(sweeps)} sweeps",
        "Held-out losses at matched FLOPs. The main loss routes by a calibrated causal threshold.",
    )
    _add_together(page, sweeps)
    for path in laws:
        report_law.section(page, path, [run.directory for s in sweeps for run in s.runs])
    for sweep in sweeps:
        page.add(
            f"{sweep.experiment}, {sweep.scale} scale",
            report_page.facts(_facts(sweep)),
            _unfinished(sweep),
            _results(sweep),
            _figures(page, sweep.finished, sweep.configurations),
            _diagnostics(page, sweep),
            _rerun(sweep),
        )
    return page.html()


def _add_together(page: Page, sweeps: Sequence[Sweep]) -> None:
    """Figures over several sweeps whose losses may be compared: equal scale and data."""
    groups: dict[tuple[str, str], list[Sweep]] = {}
    for sweep in sweeps:
        for content in {run.config.data.content for run in sweep.runs}:
            groups.setdefault((sweep.scale, content), []).append(sweep)
    for (scale, content), members in groups.items():
        compared = [c for c in data.together(members) if c.config.data.content == content]
        drawn = _figures(page, compared) if len(members) > 1 else ""
        if drawn:
            names = ", ".join(sweep.experiment for sweep in members)
            told = report_page.paragraph(f"{names}; data: {compared[0].config.data}.", "soft")
            page.add(f"All sweeps together, {scale} scale", told, drawn)


def _facts(sweep: Sweep) -> list[tuple[str, str]]:
    runs = sweep.runs
    done = sum(run.status is Status.DONE for run in runs)
    missing = sum(map(len, sweep.missing.values()))
    repeated = f"; {sweep.repeated} more hold the same trainings" if sweep.repeated else ""
    seeds = sorted({run.config.train.seed for run in runs})
    return [
        ("experiment", sweep.experiment),
        ("scale", sweep.scale),
        ("data", _data(runs)),
        ("context", ", ".join(str(n) for n in sorted({c.context for c in sweep.configurations}))),
        ("backbones", ", ".join(sorted({c.family for c in sweep.configurations}))),
        ("seeds", ", ".join(map(str, seeds))),
        ("runs", f"{done} of {len(runs) + missing} finished{repeated}"),
        ("folders", ", ".join(map(str, sweep.workdirs))),
    ]


def _data(runs: Sequence[RunRecord]) -> str:
    """The data sets of the runs; where there are several they share no held-out text."""
    sets = {run.config.data.content: str(run.config.data) for run in runs}
    text = ", ".join(sorted(sets.values()))
    if len(sets) == 1:
        return text
    return f"{text}: losses on different texts, each compared with those of its own data only"


def _unfinished(sweep: Sweep) -> str:
    """The runs that are not finished, each with how far it is or why it failed."""
    lines = [
        f"{run.directory}: {_state(run)}" for run in sweep.runs if run.status is not Status.DONE
    ]
    for folder, names in sweep.missing.items():
        lines.append(f"{folder}: not started: {', '.join(names)}")
    if not lines:
        return ""
    return report_page.heading("Not finished") + report_page.listing(lines, "bad")


def _state(run: RunRecord) -> str:
    if run.status is Status.FAILED:
        return f"failed: {records.failure(run.directory)} (--retry_failed tries again)"
    step = run.train[-1].get("step", 0) if run.train else 0
    return f"unfinished, step {step} of {run.config.train.steps}"


def _results(sweep: Sweep) -> str:
    if not sweep.finished:
        return report_page.paragraph(NOTHING)
    unpaired = [
        f"{c.name}: minus dense over {len(c.delta.values)} of {len(c.results)} seeds, those that "
        "have a finished dense run"
        for c in sweep.finished
        if c.delta is not None and len(c.delta.values) < len(c.results)
    ]
    return (
        report_page.heading("Results")
        + report_page.table(RESULTS, [row(c) for c in sweep.finished], "Results")
        + report_page.paragraph(NOTE, "soft")
        + (report_page.listing(unpaired, "soft") if unpaired else "")
        + report_page.heading("Models")
        + report_page.table(MODELS, [model_row(c) for c in sweep.finished], "Models")
        + report_page.paragraph(MODELS_NOTE, "soft")
    )


def row(configuration: Configuration) -> tuple[str, ...]:
    """Cells of a configuration under `RESULTS`."""
    final = configuration.final
    seeds = [str(result.run.train.seed) for result in configuration.results]
    return (
        configuration.name,
        ", ".join(seeds),
        _cell(configuration.loss),
        _cell(configuration.delta, sign="+"),
        _cell(final("loss_threshold")),
        _cell(final("loss_topk")),
        _cell(final("coverage"), 3),
        _cell(final("jaccard"), 3),
    )


def model_row(configuration: Configuration) -> tuple[str, ...]:
    """Cells of a configuration under `MODELS`."""
    accounting, final = configuration.accounting, configuration.final
    total, active = accounting["total_params"], accounting["n_act"]
    tokens, flops = final("tokens"), final("flops")
    return (
        configuration.name,
        draw.architecture(configuration),
        str(configuration.sparsity) if configuration.sparse else "-",
        tables.number(configuration.stride) if configuration.sparse else "-",
        str(configuration.context),
        tables.short(total),
        tables.short(active),
        f"{total / active:.2f}",
        f"{accounting['phi_ratio']:.2f}",
        tables.short(tokens.mean if tokens else None),
        tables.flops(flops.mean if flops else None),
        ", ".join(run.hash[:8] for run in configuration.runs),
    )


def _cell(value: Spread | None, digits: int = 4, sign: str = "") -> str:
    if value is None:
        return tables.UNKNOWN
    spread = "" if value.deviation is None else f" ± {tables.fixed(value.deviation, digits)}"
    return f"{tables.fixed(value.mean, digits, sign)}{spread}"


def _figures(
    page: Page, finished: Sequence[Configuration], trained: Sequence[Configuration] = ()
) -> str:
    drawn = (
        *draw.against_sparsity(finished),
        (draw.against_routed_tokens(finished), "Loss against L/K."),
        (draw.against_active(finished), "Loss against active-equivalent parameters."),
        (draw.against_stride(finished), "Loss against the anchor stride A."),
        (draw.against_total(finished), "Loss against total parameters, every architecture."),
        (draw.training_curves(trained), "Training loss under top-k routing, every seed."),
    )
    shown = report_page.figures(*(page.figure(figure, caption) for figure, caption in drawn))
    several = any(len(configuration.results) > 1 for configuration in finished)
    return shown + (report_page.paragraph(series.ERRORS, "soft") if shown and several else "")


def _diagnostics(page: Page, sweep: Sweep) -> str:
    found = data.diagnostics(sweep)
    if not found:
        return ""
    drawn = [
        page.figure(
            diagnostics_figure.figure({name: one}, columns=1), f"Updates of a token: {name}."
        )
        for name, one in itertools.islice(found.items(), _DRAWN)
    ]
    more = f"Figures of the first {_DRAWN} runs; the table has all {len(found)}."
    return (
        report_page.heading("Routing diagnostics")
        + report_page.figures(*drawn)
        + (report_page.paragraph(more, "soft") if len(found) > _DRAWN else "")
        + report_page.table(
            report_diagnostics.HEADER, report_diagnostics.table_rows(found), "Routing diagnostics"
        )
        + report_page.paragraph(UPDATES, "soft")
    )


def _rerun(sweep: Sweep) -> str:
    """Commands that train, diagnose and report the sweep again, and each run by itself."""
    whole = dict.fromkeys(_command("sweep", run, run.directory.parent) for run in sweep.runs)
    folders = shlex.quote(",".join(map(str, sweep.workdirs)))
    commands = [*whole, f"python -m experiments.report --workdir={folders}"]
    if any(configuration.sparse for configuration in sweep.configurations):
        commands.insert(-1, f"python -m experiments.diagnose --workdir={folders}")
    single = [
        f"{_command('train', run, run.directory.parent)} --run={shlex.quote(run.config.name)}"
        for run in sweep.runs
    ]
    changed = [str(run.directory) for run in sweep.runs if not data.defined_today(run)]
    note = (
        f"The experiment's present definition differs from what trained {', '.join(changed)}: a "
        "rerun needs the code of that time, or another work directory."
    )
    return (
        report_page.heading("How to rerun")
        + report_page.paragraph("A finished run is kept and an unfinished one resumes.", "soft")
        + report_page.commands(commands)
        + report_page.folded("Each run by itself", report_page.commands(single))
        + (report_page.paragraph(note, "bad") if changed else "")
    )


def _command(name: str, run: RunRecord, workdir: pathlib.Path) -> str:
    config = run.config
    parts = {
        "experiment": config.experiment,
        "scale": config.scale,
        "seed": config.train.seed,
        "data": config.data.source,
        "workdir": workdir,
    }
    if config.budget != 1:
        parts["budget"] = f"{config.budget!r}"
    if config.execution.keep_products:
        parts["keep_products"] = "true"
    if config.start is not None and name == "train":
        parts |= {"start_from": config.start.directory, "start_sparse": config.start.sparse}
    arguments = " ".join(f"--{key}={shlex.quote(str(value))}" for key, value in parts.items())
    return f"python -m experiments.{name} {arguments}"
