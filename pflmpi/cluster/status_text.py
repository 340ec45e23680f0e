"""A job and its run in words."""

from collections.abc import Iterator
from datetime import timedelta

from pflmpi.cluster.jobs import Job
from pflmpi.cluster.run_status import RunStatus
from pflmpi.errors import Stopped


def headline(job: Job) -> str:
    """State, reason, nodes and restarts of a job in one line."""
    words = [f"job {job.id} {job.state}"]
    if job.active:
        words.append(f"on {_nodes(job)} ({job.node_list})")
    elif job.waiting:
        words.append(f"({job.reason or 'no reason given'}), asks for {_nodes(job)}")
        words += [f"and is expected to start at {job.start}"] if job.start else []
    else:
        words += [f"({job.reason})"] if job.reason not in ("", job.state) else []
        words += [f"with exit code {job.exit_code}"] if job.exit_code else []
        words += [f"on {_nodes(job)} ({job.node_list})"] if job.node_list else []
    restarts = f"{job.restarts} restart{'s' * (job.restarts != 1)}"
    return f"{' '.join(words)}, {restarts}"


def progress_lines(run: RunStatus, job: Job | None) -> Iterator[str]:
    """Lines on a run's progress and speed, and whether the job will finish within its time limit."""
    if run.problem:
        yield run.problem
        return
    yield _round(run)
    yield from run.notes
    if run.early:
        yield f"stopped early: {run.early}"
    if run.per_round is not None:
        yield _speed(run, job)
    if run.done:
        return
    if job is None:
        yield "not finished: `pflmpi resume` continues it, unless it is running elsewhere"
    elif not (job.active or job.waiting):
        stopped = (
            "stopped after a complete round" if job.exit_code == Stopped.exit_code else "ended before the last round"
        )
        yield f"{stopped}; what is complete is kept: submit the same again, and it continues (or `pflmpi resume`)"
    elif (missing := _missing(run, job)) > 0:
        assert run.per_round is not None
        fitting = int((_left(job) or 0.0) / run.per_round)
        yield (
            f"IT WILL NOT FIT: {clock(missing)} too little, about {fitting} of the {run.rounds - run.round} rounds "
            "left end in time; what is complete is kept: a job submitted with --requeue continues by itself, otherwise "
            "submit the same again when it has ended, with more --time"
        )


def progress_summary(run: RunStatus | None, job: Job | None) -> str:
    """One-line progress summary."""
    if run is None:
        return "not begun"
    if run.problem:
        return run.problem
    words = [f"round {run.round} of {run.rounds}{', stopped early' * bool(run.early)}"]
    words += [f"accuracy {100 * run.accuracy:.2f} %"] if run.accuracy is not None else []
    words += run.notes
    if run.done or run.per_round is None:
        return ", ".join(words)
    if job is not None and job.active:
        words.append(f"{run.per_round:.2f} s per round, {clock(run.to_end or 0.0)} to the end")
        if (left := _left(job)) is not None:
            words.append(f"{clock(left)} left{': IT WILL NOT FIT' * (_missing(run, job) > 0)}")
    elif run.age is not None:
        words.append(f"the last one ended {clock(run.age)} ago")
    return ", ".join(words)


def clock(seconds: float) -> str:
    """A duration for display.

    >>> clock(58.3), clock(93630)
    ('0:00:58', '1 day, 2:00:30')
    """
    return str(timedelta(seconds=round(seconds)))


def _round(run: RunStatus) -> str:
    words = [f"round {run.round} of {run.rounds}"]
    if run.ranks is not None:
        words.append(f"{run.ranks} rank{'s' * (run.ranks != 1)}")
    if run.accuracy is not None and run.best is not None:
        words.append(f"accuracy {100 * run.accuracy:.2f} % (best {100 * run.best[0]:.2f} % in round {run.best[1]})")
    words += [f"unseen clients {100 * run.unseen:.2f} %"] if run.unseen is not None else []
    words.append("no checkpoint yet" if run.checkpoint is None else f"newest checkpoint of round {run.checkpoint}")
    return ", ".join(words)


def _speed(run: RunStatus, job: Job | None) -> str:
    words = [f"{run.per_round:.2f} s per round"]
    if run.age is not None:
        words.append(f"the last one ended {clock(run.age)} ago")
    if not run.done and run.to_end is not None:
        words.append(f"{clock(run.to_end)} to the end")
    if job is not None and (job.active or job.waiting):
        left = _left(job)
        words.append("no time limit" if left is None else f"{clock(left)} left of {clock(job.limit or 0.0)}")
    return ", ".join(words)


def _left(job: Job) -> float | None:
    """Seconds before the job's time limit; None without one."""
    return None if job.limit is None else max(job.limit - job.seconds, 0.0)


def _missing(run: RunStatus, job: Job) -> float:
    """Seconds that the run needs beyond the job's time limit."""
    left = _left(job)
    return 0.0 if left is None or run.to_end is None else run.to_end - left


def _nodes(job: Job) -> str:
    return f"{job.nodes} node{'s' * (job.nodes != '1')}"
