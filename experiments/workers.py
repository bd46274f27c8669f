"""Several workers of one sweep on one machine, each a process on cores of its own.

A small model's step does not fill a second core: two runs side by side, a core each, train nearly
twice as many tokens a second as one run on both. The workers share the runs as workers on several
machines do: each claims what nobody holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from experiments import environment, runner, troubles
from experiments.progress import Display, Progress
from experiments.registry import Experiment
from experiments.runner import Outcome
from xmod_jax.config import RunConfig
from xmod_jax.errors import UserError
from xmod_jax.training.preemption import Preempted, Watch

if TYPE_CHECKING:  # at run time the parent needs none of what it loads
    from xmod_jax.training.checkpoint import Keep


@dataclasses.dataclass(frozen=True)
class Job:
    """What every worker of a sweep is given.

    Attributes:
      runs: what to train, in this order.
      workdir: holds a directory for each run.
      retry_failed: try runs again that failed before.
      keep: which checkpoints stay.
    """

    runs: tuple[RunConfig, ...]
    workdir: pathlib.Path
    retry_failed: bool
    keep: Keep


def chosen(given: int | None, experiment: Experiment, pending: int, apart: bool) -> int:
    """How many workers a sweep has.

    Args:
      given: what the user says; None: as many as there are cores at mini scale, one elsewhere.
      experiment: what is trained.
      pending: runs that are left to train.
      apart: whether this process trains by itself, without a mesh.

    Raises:
      UserError: more than there are cores, or several where processes or a mesh are asked for.
    """
    if given is None:
        suits = apart and experiment.scale == "mini" and _on_cpu()
        return max(1, min(len(cores()), pending)) if suits else 1
    if given > len(cores()):
        raise UserError(f"--workers={given}: there are {len(cores())} cores; each needs one")
    if given > 1 and not apart:
        raise UserError(f"--workers={given} is for one process without --mesh")
    if given > 1 and not _on_cpu():
        raise UserError(f"--workers={given} is for the CPU: on devices give each run a --shard")
    return given


def _on_cpu() -> bool:
    import jax

    return jax.default_backend() == "cpu"


def cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def train(job: Job, count: int, display: Display) -> Outcome:
    """Trains the runs of a job in `count` workers; shows all of them on one display.

    Raises:
      UserError: what a worker was told that is the user's mistake; the others end first.
      Preempted: asked to leave; every worker has saved.
      RuntimeError: a worker ended by itself; its own output says why.
    """
    context = multiprocessing.get_context("spawn")
    mine = cores()
    with contextlib.ExitStack() as stack:
        workers = []
        for index in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(job, mine[index::count], theirs), name=f"worker {index}"
            )
            process.start()
            theirs.close()
            workers.append(_Worker(process, ours, display, stack))
        with _forwarding(workers):
            _follow(workers)
    return _together(job, workers)


class _Worker:
    """A worker as the parent sees it."""

    def __init__(
        self, process: Any, pipe: Connection, display: Display, stack: contextlib.ExitStack
    ) -> None:
        self.process, self.pipe = process, pipe
        self.outcome: Outcome | None = None
        self.trouble: Exception | None = None
        self._display = display
        self._bar = stack.enter_context(contextlib.ExitStack())
        self._progress: Callable[[Progress], None] = lambda progress: None

    def take(self) -> bool:
        """Takes one message; False once there are no more."""
        try:
            kind, value = self.pipe.recv()
        except EOFError:
            if self.outcome is None and self.trouble is None:
                self.process.join()
                self.trouble = _ended(self.process)
            return False
        getattr(self, f"_{kind}")(value)
        return True

    def _begin(self, run: RunConfig) -> None:
        self._progress = self._bar.enter_context(self._display.bar(run))

    def _step(self, progress: Progress) -> None:
        self._progress(progress)

    def _end(self, _: None) -> None:
        self._bar.close()

    def _say(self, line: str) -> None:
        self._display.say(line)

    def _drop(self, run: RunConfig) -> None:
        self._display.drop(run)

    def _done(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def _trouble(self, error: Exception) -> None:
        self.trouble = error


def _ended(process: Any) -> Exception:
    """What is wrong with a worker that ended without a word."""
    if process.exitcode == -signal.SIGTERM:  # it had not got as far as to heed it
        return Preempted(f"{process.name} of the sweep was asked to leave before it began")
    return RuntimeError(f"{process.name} of the sweep ended with {process.exitcode}")


def _follow(workers: Sequence[_Worker]) -> None:
    """Shows what the workers tell until all have ended; one in trouble makes the others leave."""
    open_pipes = {worker.pipe: worker for worker in workers}
    while open_pipes:
        for pipe in wait(list(open_pipes)):
            worker = open_pipes[pipe]  # type: ignore[index]
            if worker.take():
                continue
            del open_pipes[pipe]  # type: ignore[arg-type]
            worker.process.join()
            if worker.trouble is not None:
                _leave(workers)


def _leave(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        if worker.process.is_alive():
            worker.process.terminate()  # it saves and leaves, as at any SIGTERM


@contextlib.contextmanager
def _forwarding(workers: Sequence[_Worker]) -> Iterator[None]:
    """Passes on requests to leave; ends the workers when the block is left by an error."""
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, lambda *_: _leave(workers)) for number in numbers}
    try:
        yield
    except BaseException:
        for worker in workers:
            worker.process.kill()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _together(job: Job, workers: Sequence[_Worker]) -> Outcome:
    """What became of all runs; raises what a worker met."""
    troubles = [worker.trouble for worker in workers if worker.trouble is not None]
    # A worker that was asked to leave, because of another's trouble, is not the trouble.
    troubles.sort(key=lambda error: isinstance(error, Preempted))
    if troubles:
        raise troubles[0]
    outcomes = [worker.outcome for worker in workers if worker.outcome is not None]
    order = [run.folder for run in job.runs]
    done = {name for outcome in outcomes for name in outcome.done}
    failed = {name: why for outcome in outcomes for name, why in outcome.failed.items()}
    held = {name: who for outcome in outcomes for name, who in outcome.held.items()}
    ended = done | set(failed)
    return Outcome(
        [name for name in order if name in done],
        {name: failed[name] for name in order if name in failed},
        {name: held[name] for name in order if name in held and name not in ended},
    )


class _Remote:
    """The display of a worker: the parent's."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def say(self, line: str) -> None:
        self._pipe.send(("say", line))

    def drop(self, run: RunConfig) -> None:
        self._pipe.send(("drop", run))

    @contextlib.contextmanager
    def bar(self, run: RunConfig) -> Iterator[Callable[[Progress], None]]:
        self._pipe.send(("begin", run))
        try:
            yield lambda progress: self._pipe.send(("step", progress))
        finally:
            self._pipe.send(("end", None))


def _work(job: Job, mine: list[int], pipe: Connection) -> None:
    """A worker: trains what nobody holds, on its own cores, as long as its parent lives."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, mine)  # before JAX counts them
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells the parent as well
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        environment.settle()
        with Watch().signals() as watch:
            outcome = runner.run_all(
                job.runs,
                job.workdir,
                _trainer(job.keep, watch),
                _Remote(pipe),
                job.retry_failed,
                asked=lambda: watch.arrived,
            )
        pipe.send(("done", outcome))
    except (UserError, Preempted) as error:
        pipe.send(("trouble", error))
    except Exception as error:
        line = troubles.line(error)
        if line is None:
            raise
        pipe.send(("trouble", UserError(line)))


def _trainer(keep: Keep, watch: Watch) -> runner.Trainer:
    from xmod_jax.training import loop

    def train(run: RunConfig, directory: pathlib.Path, progress: Any) -> None:
        loop.train(run, directory, progress, watch=watch, keep=keep)

    return runner.Trainer(train, loop.RunFailed)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
