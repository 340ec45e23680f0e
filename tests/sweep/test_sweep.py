"""A sweep does what is not done yet, survives what fails, can be stopped, and leaves no process behind."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import processes
import quick_run
import table_file
from pflmpi import regular_file
from pflmpi.cli import main
from pflmpi.commands.sweep import make_environments
from pflmpi.config import load as configuration
from pflmpi.data import load as load_data
from pflmpi.data.federation import save
from pflmpi.errors import ConfigError
from pflmpi.experiment import recorded_data
from pflmpi.experiment.build import load_federation
from pflmpi.store import metrics_file, run_folder, run_lock, verify
from pflmpi.store.run_lock import take
from pflmpi.sweep.lock import lock_sweep_folder
from pflmpi.sweep.pending import plan_cell, prepare_cell, skip_if_running
from pflmpi.sweep.runs import SweepProgress, run_all
from pflmpi.sweep.table import list_cells, load

MISSING = {"data": {"name": "mnist", "root": "nowhere"}}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# --- what is still to be done -------------------------------------------------------------------------------------


@pytest.fixture
def cell(tmp_path):
    return list_cells(load(table_file.write(tmp_path)), [], None)[0]


def needed(cell, out, **changes):
    """What a cell needs when sections of its configuration have changed."""
    raw = {**cell.raw, **{name: {**cell.raw.get(name, {}), **keys} for name, keys in changes.items()}}
    return plan_cell(replace(cell, raw=raw), configuration.parse(raw), out, ranks=1)


def run(cell, out):
    quick_run.run(cell.raw, cell.run(out))
    return cell.run(out)


def test_a_cell_without_a_run_is_started_with_its_configuration_beside_it(cell, tmp_path):
    work = needed(cell, tmp_path)
    folder = str(tmp_path / "FedAvg" / "few")
    start = ["run", f"{folder}/seed0.yaml", "--out", f"{folder}/seed0", "--continue", "--ranks", "1", "--quiet"]
    assert (work.state, work.done, work.rounds, list(work.command)) == ("start", 0, 2, start)
    assert not Path(folder).exists()
    prepare_cell(work, tmp_path)
    assert configuration.load(Path(f"{folder}/seed0.yaml")) == configuration.parse(cell.raw)


@pytest.mark.parametrize("runtime", [{}, {"executor": "lanes"}, {"lanes": 2}])
def test_a_finished_run_is_done_whether_or_not_it_has_chosen_its_executor(runtime, cell, tmp_path):
    run(cell, tmp_path)
    work = needed(cell, tmp_path, runtime=runtime)
    assert (work.state, work.done, work.command) == ("done", 2, ())


def test_a_run_continues_when_more_rounds_are_requested(cell, tmp_path):
    folder = run(cell, tmp_path)
    work = needed(cell, tmp_path, training={"rounds": 3}, checkpoint={"keep": 1}, runtime={"timeout": 60})
    changes = ["-s", "checkpoint.keep=1", "-s", "runtime.timeout=60.0", "-s", "training.rounds=3"]
    assert (work.state, work.done) == ("continue", 2)
    assert list(work.command) == ["resume", str(folder), *changes, "--ranks", "1", "--quiet"]
    quick_run.resume(folder, tuple(changes[1::2]))
    assert needed(cell, tmp_path, training={"rounds": 3}).state == "done"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"training": {"lr": 0.5}}, ["training.lr = 0.1 in the run, 0.5 now"]),
        ({"training": {"rounds": 1}}, ["reached round 2", "training.rounds is 1"]),
        ({"runtime": {"executor": "loop"}}, ["runtime.executor = 'lanes' in the run, 'loop' now"]),
        ({"runtime": {"lanes": 3}}, ["runtime.lanes = 2 in the run, 3 now"]),
    ],
)
def test_a_run_made_with_another_configuration_stays_as_it_is(changes, words, cell, tmp_path):
    folder = run(cell, tmp_path)
    before = quick_run.digest(folder)
    work = needed(cell, tmp_path, **changes)
    assert (work.state, work.command) == ("other", ()) and all(word in work.problem for word in words), work.problem
    prepare_cell(work, tmp_path)
    assert quick_run.digest(folder) == before and not cell.config(tmp_path).exists()


@pytest.mark.parametrize("linked", [False, True])
def test_a_run_stopped_before_its_first_checkpoint_starts_anew_and_nothing_is_deleted(linked, cell, tmp_path):
    folder = run(cell, tmp_path)
    for path in folder.glob("round_*.h5"):
        path.unlink()
    metrics_file.restart(folder, 0)
    own = ("notes.txt", "jobs.txt", "shards/thesis.txt", "first-try/notes.yaml")
    (folder / "first-try").mkdir()
    for name in own:
        (folder / name).write_text("mine")
    for name in ("modules.h5", "shards/round_00000_rank_000.0badcafe.h5.tmp"):  # of the run that was stopped
        (folder / name).touch()
    if linked:
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    work = needed(cell, tmp_path, training={"lr": 0.5})
    assert (work.state, work.problem) == ("start", "")
    prepare_cell(work, tmp_path)
    assert quick_run.command([*work.command]) == 0
    assert needed(cell, tmp_path, training={"lr": 0.5}).state == "done"
    assert all((folder / name).read_text() == "mine" for name in own) and folder.is_symlink() == linked
    assert not (folder / "modules.h5").exists() and not [*folder.rglob("*.tmp")]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_link_that_leads_nowhere_is_a_failure_of_its_cells_alone(depth, tmp_path, capfd):
    path = table_file.write(tmp_path, seeds=[0])
    link = [Path("out/FedAvg/few/seed0"), Path("out/FedAvg/few")][depth]
    link.parent.mkdir(parents=True)
    link.symlink_to("gone")
    assert main(["sweep", str(path), "--out", "out", "--only", "*/few", "--ranks", "1"]) == 1
    text = capfd.readouterr()
    assert f"{link} is a link to gone, which is missing; make that folder" in text.err
    assert "2 runs: 1 done" in text.out and link.is_symlink()


def test_a_run_that_another_process_writes_is_left_alone(cell, tmp_path):
    folder = run(cell, tmp_path)
    for path in folder.glob("round_*.h5"):
        path.unlink()
    lock = take(folder, {}, take_over=False)
    try:
        work = skip_if_running(needed(cell, tmp_path), tmp_path)
        assert (work.state, work.command) == ("other", ()) and f"by process {os.getpid()} on" in work.problem
        prepare_cell(work, tmp_path)
        assert (folder / "lock.json").exists()
    finally:
        lock.release()
    assert skip_if_running(needed(cell, tmp_path), tmp_path).state == "start"


def test_a_run_whose_writer_was_on_a_lost_host_goes_on(cell, tmp_path):
    folder = run(cell, tmp_path)
    lock = take(folder, {"Slurm job 7": 0}, take_over=False)
    try:
        owner = json.loads(run_lock.path(folder).read_text())
        run_lock.path(folder).write_text(json.dumps({**owner, "token": "another", "host": "node7", "system": "gone"}))
        more = needed(cell, tmp_path, training={"rounds": 3})
        assert skip_if_running(more, tmp_path).state == "other", "it may live"
        assert skip_if_running(more, tmp_path, {"Slurm job 7": 0}).state == "other"
        assert skip_if_running(more, tmp_path, {"Slurm job 7": 1}).state == "continue", "of the same job, requeued"
        os.utime(run_lock.path(folder), (0, time.time() - 2 * run_lock.SILENCE))
        assert skip_if_running(more, tmp_path).state == "continue"
        assert not list(folder.glob("*.tmp"))
    finally:
        lock.release()


def test_a_run_with_damaged_checkpoints_only_is_kept_aside(cell, tmp_path):
    folder = run(cell, tmp_path)
    for path in folder.glob("round_*.h5"):
        path.write_bytes(b"nothing")
    work = needed(cell, tmp_path)
    assert work.state == "start" and "no good checkpoint" in work.problem
    prepare_cell(work, tmp_path)
    assert not folder.exists()
    (aside,) = folder.parent.glob("old-seed0-*")
    assert (aside / "round_00002.h5").read_bytes() == b"nothing"


def test_a_run_whose_newest_checkpoint_cannot_be_read_is_neither_continued_nor_put_aside(cell, tmp_path, monkeypatch):
    folder = run(cell, tmp_path)

    def read(path):
        if path.suffix == ".h5":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return open(path, "rb")

    monkeypatch.setattr(regular_file, "open_regular", read)
    work = needed(cell, tmp_path)
    assert work.state == "other" and f"{folder}/round_00002.h5 cannot be read: Input/output error; make" in work.problem


def test_a_finished_run_copied_without_its_checkpoints_is_kept_aside(cell, tmp_path, capsys, caplog):
    folder = run(cell, tmp_path)
    for path in folder.rglob("*.h5"):
        path.unlink()
    figures = metrics_file.read_bytes(folder)
    path, out = table_file.write(tmp_path), str(tmp_path)
    assert main(["sweep", str(path), "--out", out, "--only", "FedAvg/few", "--seeds", "1", "--dry-run"]) == 0
    assert f"start  anew; the run there is kept: {folder} has metrics of 2 rounds and" in capsys.readouterr().out
    prepare_cell(needed(cell, tmp_path), tmp_path)
    assert not folder.exists()
    (aside,) = folder.parent.glob("old-seed0-*")
    assert metrics_file.read_bytes(aside) == figures and f"its run is kept in {aside}: " in caplog.text


def write_data(path, seed):
    rng = np.random.default_rng(seed)
    path.parent.mkdir(exist_ok=True)
    np.savez(path, x=rng.random((40, 3), np.float32), y=np.arange(40) % 2, client=np.arange(40) // 20)


@pytest.fixture
def with_data(cell, tmp_path):
    """A cell with data of the user's own, and its finished run."""
    write_data(tmp_path / "data.npz", 0)
    data = {"name": "mine", "path": str(tmp_path / "data.npz")}
    cell = replace(cell, raw={**cell.raw, "data": data, "partition": {"name": "writers"}})
    run(cell, tmp_path)
    return cell


@pytest.mark.parametrize("name", ["data.npz", "other.npz", "there/data.npz"])
def test_a_run_on_other_data_is_neither_done_nor_goes_on(name, with_data, tmp_path):
    write_data(tmp_path / name, 1)
    data = {"name": "mine", "path": str(tmp_path / name)}
    for rounds in (2, 3):
        work = needed(with_data, tmp_path, data=data, training={"rounds": rounds})
        assert (work.state, work.command) == ("other", ()) and "the data has changed since" in work.problem
    anew = plan_cell(with_data, configuration.parse({**with_data.raw, "data": data}), tmp_path, 1, anew=True)
    assert (anew.state, anew.command[0]) == ("start", "run")


def test_a_run_with_another_saved_partition_is_not_done(with_data, tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        iid = {**with_data.raw, "partition": {"name": "iid", "clients": 2}, "seed": seed}
        save(load_federation(configuration.parse(iid)), tmp_path / f"{name}.npz")
    raw = {**with_data.raw, "partition": {"path": str(tmp_path / "a.npz")}}
    cell = replace(with_data, seed=1, raw=raw)
    run(cell, tmp_path)
    shutil.move(tmp_path / "a.npz", tmp_path / "c.npz")
    assert needed(cell, tmp_path, partition={"path": str(tmp_path / "c.npz")}).state == "done", "moved"
    work = needed(cell, tmp_path, partition={"path": str(tmp_path / "b.npz")})
    assert work.state == "other" and "the partition has changed since" in work.problem


def test_data_that_were_moved_are_known_by_their_content(with_data, tmp_path):
    shutil.move(tmp_path / "data.npz", tmp_path / "moved.npz")
    moved = {"path": str(tmp_path / "moved.npz")}
    assert needed(with_data, tmp_path, data=moved).state == "done"
    assert needed(with_data, tmp_path, data=moved, training={"rounds": 3}).state == "continue"


def test_data_that_are_not_on_this_machine_are_known_by_their_name(with_data, tmp_path):
    assert needed(with_data, tmp_path, data={"path": "/elsewhere/data.npz"}).state == "done"
    work = needed(with_data, tmp_path, data={"path": "/elsewhere/wrong.npz"})
    assert work.state == "other" and "/elsewhere/wrong.npz now, which cannot be read" in work.problem


def test_data_are_read_once_and_only_where_they_may_have_changed(with_data, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(recorded_data, "load", lambda *words: read.append(words) or load_data(*words))
    assert needed(with_data, tmp_path).state == "done" and not read
    shutil.copy(tmp_path / "data.npz", tmp_path / "copied.npz")
    for _ in range(3):
        assert needed(with_data, tmp_path, data={"path": str(tmp_path / "copied.npz")}).state == "done"
    assert len(read) == 1


# --- processes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def held(tmp_path):
    with lock_sweep_folder(tmp_path / "held") as descriptor:
        yield descriptor


def shell(name, script, folder):
    return name, ["sh", "-c", script], folder / f"{name}.log"


def test_a_command_leaves_no_exit_code_for_the_launcher_of_the_sweep(tmp_path, held):
    """The last one's would be taken for that of all."""
    job = shell("job", "echo ${PFLMPI_EXIT_FILE:-none} $PLACE", tmp_path)
    list(run_all([job], [{"PLACE": "left", "PFLMPI_EXIT_FILE": str(tmp_path / "code")}], held))
    assert job[2].read_text() == "none left\n"


def test_a_limited_number_of_jobs_runs_at_a_time_each_with_its_own_log(tmp_path, held):
    jobs = [
        shell(f"job{number}", f"echo out $PLACE; sleep 0.1; echo err >&2; exit {number}", tmp_path)
        for number in range(5)
    ]
    looks = list(run_all(jobs, [{"PLACE": "left"}, {"PLACE": "right"}], held))
    ended = {name: code for _, codes in looks for name, code in codes.items()}
    assert ended == {f"job{number}": number for number in range(5)}
    assert max(len(running) + len(codes) for running, codes in looks) == 2
    texts = [log.read_text() for _, _, log in jobs]
    assert {text.split("\n")[0] for text in texts} == {"out left", "out right"}
    assert all(text.endswith("\nerr\n") for text in texts)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_closing_ends_every_process_of_the_groups(tmp_path, held):
    job = shell("job", "sleep 60 & echo $!; wait", tmp_path)
    with closing(run_all([job], [{}], held)) as looks:
        for _ in looks:
            if job[2].read_text().strip():
                break
    child = int(job[2].read_text())
    processes.wait_for(lambda: not alive(child), "the end of the group")


def test_gpus_are_shared_out_among_the_jobs(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert [place["CUDA_VISIBLE_DEVICES"] for place in make_environments(2)] == ["4,6", "5"]
    assert [place["CUDA_VISIBLE_DEVICES"] for place in make_environments(4)] == ["4", "5", "6", "4"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [place["CUDA_VISIBLE_DEVICES"] for place in make_environments(1)] == ["0,1,2"]


# --- one sweep in a folder ----------------------------------------------------------------------------------------

HOLD = "import sys, time; from pathlib import Path; from pflmpi.sweep.lock import lock_sweep_folder\n"
HOLD += "with lock_sweep_folder(Path(sys.argv[1])) as lock: print('held', flush=True); time.sleep(60)"


def test_a_second_sweep_in_a_folder_is_refused_until_the_first_has_ended(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another sweep works in"), lock_sweep_folder(tmp_path):
            pass
        first.kill()  # leaves nothing behind
    with lock_sweep_folder(tmp_path):
        pass


def test_the_lock_holds_while_a_run_of_a_killed_sweep_continues(tmp_path):
    job = shell("job", "exec sleep 60", tmp_path)
    with lock_sweep_folder(tmp_path / "out") as descriptor:
        looks = run_all([job], [{}], descriptor)
        next(looks)
    with pytest.raises(ConfigError, match="or runs left behind by a killed one"), lock_sweep_folder(tmp_path / "out"):
        pass
    looks.close()
    with lock_sweep_folder(tmp_path / "out"):
        pass


# --- the command --------------------------------------------------------------------------------------------------


def test_a_sweep_survives_a_failing_cell_and_does_not_repeat_what_is_done(tmp_path, capfd):
    path = table_file.write(
        tmp_path, seeds=[0], columns={"few": {}}, exceptions=[{"row": "Local", "set": MISSING}], notes=["note"]
    )
    assert main(["sweep", str(path), "--jobs", "2", "--ranks", "1"]) == 1
    shown = capfd.readouterr()
    folder = Path("sweeps") / "small"
    assert "2 runs: 1 done (0 of them before), 1 failed" in shown.out and f"pflmpi table {path}" in shown.out
    lines = shown.err.splitlines()
    assert sorted(line.split("] ")[1].split(":")[0] for line in lines[:2]) == ["FedAvg/few/seed0", "Local/few/seed0"]
    assert "failed: dataset 'mnist' was not found" in lines[2]
    assert lines[3].split() == ["Local/few/seed0", str(folder / "Local" / "few" / "seed0.log")]
    run = folder / "FedAvg" / "few" / "seed0"
    assert verify.find_newest_good(run) == (2, []) and len(metrics_file.read(run)) == 2
    written = (run / "config.yaml").stat().st_mtime_ns
    assert main(["sweep", str(path), "--only", "fedavg/*"]) == 0
    assert "1 runs: 1 done (1 of them before), 0 failed" in capfd.readouterr().out
    assert (run / "config.yaml").stat().st_mtime_ns == written


def test_another_configuration_is_a_failed_cell_that_names_the_keys(tmp_path, capfd):
    path = table_file.write(tmp_path, seeds=[0], columns={"few": {}}, rows={"A": {"algorithm": {"name": "local"}}})
    (cell,) = list_cells(load(path), [], None)
    run(cell, Path("sweeps/small"))
    assert main(["sweep", str(path), "-s", "training.lr=0.7"]) == 1
    shown = capfd.readouterr()
    assert "1 runs: 0 done (0 of them before), 1 failed" in shown.out
    assert "training.lr = 0.01 in the run, 0.7 now" in shown.err and "A/few/seed0" in shown.err


@pytest.fixture
def corrected(tmp_path):
    """A table of five cells: one done, one that failed and is corrected now, two that failed, and one not begun."""
    rows = {name: {"algorithm": {"name": "local"}} for name in ("done", "corrected", "failed", "no round", "not begun")}
    path = table_file.write(tmp_path, seeds=[0], columns={"few": {}}, rows=rows)
    out = Path("sweeps/small")
    done, to_correct, failed, no_round, _ = list_cells(load(path), [], None)
    for cell in (done, to_correct, failed):
        quick_run.run(cell.raw, cell.run(out))
    (to_correct.run(out) / "round_00002.h5").unlink()
    (failed.run(out) / "round_00002.h5").unlink()
    for cell in (to_correct, failed, no_round):
        cell.log(out).parent.mkdir(parents=True, exist_ok=True)
        cell.log(out).write_text("pflmpi: internal error\n")
    correction = {"row": "corrected", "set": {"training": {"lr": 0.02}}}
    return table_file.write(tmp_path, seeds=[0], columns={"few": {}}, rows=rows, exceptions=[correction])


def test_failed_cells_run_again_and_those_of_another_configuration_anew(corrected, capfd, caplog):
    out = Path("sweeps/small")
    words = ["sweep", str(corrected), "--failed", "--ranks", "1"]
    assert main([*words, "--dry-run"]) == 0
    states = {line.split("/")[0]: line for line in capfd.readouterr().out.splitlines()[:3]}
    assert states.keys() == {"corrected", "failed", "no round"}
    assert "other" in states["corrected"] and "--anew starts it anew, and keeps this run" in states["corrected"]
    assert main([*words, "--anew"]) == 0
    assert "3 runs: 3 done (0 of them before), 0 failed" in capfd.readouterr().out
    (aside,) = (out / "corrected" / "few").glob("old-seed0-*")
    assert f"corrected/few/seed0 starts anew; its run is kept in {aside}: " in caplog.text
    assert run_folder.rounds(aside) == [0, 1], "as it was"
    assert not [*out.glob("failed/few/old-*")], "this one went on"
    assert not (out / "not begun").exists()
    assert main(words) == 0
    assert capfd.readouterr().out == f"no cell in {out} has failed; nothing to run\n"


def test_a_run_that_was_done_before_its_table_changed_has_not_failed(tmp_path, capfd):
    path = table_file.write(tmp_path, seeds=[0], columns={"few": {}}, rows={"A": {"algorithm": {"name": "local"}}})
    (cell,) = list_cells(load(path), [], None)
    run(cell, Path("sweeps/small"))
    assert main(["sweep", str(path), "-s", "training.lr=0.7", "--failed"]) == 0
    shown = capfd.readouterr().out
    assert "has failed; nothing to run" in shown
    assert "done before the table or the data changed: A/few/seed0 (for --anew without --failed)" in shown
    assert main(["sweep", str(path), "-s", "training.lr=0.7", "--anew", "--ranks", "1"]) == 0
    assert len([*Path("sweeps/small/A/few").glob("old-seed0-*")]) == 1


def test_a_run_that_failed_on_its_way_to_more_rounds_has_failed(tmp_path, capfd):
    path = table_file.write(tmp_path, seeds=[0], columns={"few": {}}, rows={"A": {"algorithm": {"name": "local"}}})
    (cell,) = list_cells(load(path), [], None)
    run(cell, Path("sweeps/small"))
    assert main(["sweep", str(path), "-s", "training.rounds=4", "--failed", "--dry-run"]) == 0
    assert "A/few/seed0  2/4 rounds  continue" in capfd.readouterr().out


def test_on_a_terminal_bars_show_all_runs_and_the_running_ones(cell, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    folder = run(cell, tmp_path)
    done, going = needed(cell, tmp_path), needed(replace(cell, seed=1), tmp_path, training={"rounds": 7})
    folder.rename(going.cell.run(tmp_path))
    with SweepProgress([done, going], tmp_path) as progress:
        progress.running([going.cell.name])
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", capfd.readouterr().err)
    assert re.search(r"1/2 runs, rounds\W+4/9 ", text), text  # 2 of 2 and 2 of 7
    assert re.search(r"FedAvg/few/seed1\W+2/7 ", text), text


def test_a_dry_run_shows_states_and_command_lines_and_changes_nothing(tmp_path, capsys):
    path = table_file.write(tmp_path, seeds=[0], columns={"few": {}})
    done, _ = list_cells(load(path), [], None)
    run(done, Path("sweeps/small"))
    assert main(["sweep", str(path), "--dry-run", "--ranks", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "FedAvg/few/seed0  2/2 rounds  done",
        "Local/few/seed0   0/2 rounds  start",
        "commands of the sweep, which first writes the configurations that they name:",
        "pflmpi run sweeps/small/Local/few/seed0.yaml --out sweeps/small/Local/few/seed0 --continue --ranks 3 --quiet",
    ]
    assert main(["sweep", str(path), "--dry-run", "--ranks", "3", "-s", "training.rounds=4"]) == 0
    shown = capsys.readouterr().out
    assert "2/4 rounds  continue" in shown
    assert "pflmpi resume sweeps/small/FedAvg/few/seed0 -s training.rounds=4 --ranks 3 --quiet" in shown
    assert {path.name for path in Path("sweeps/small").iterdir()} == {"FedAvg"}


@pytest.mark.parametrize(
    "changes, words, expected",
    [
        ({"exceptions": [{"row": "Local", "set": {"model": {"hidden": -1}}}]}, [], "Local/few: model.hidden = -1"),
        ({}, ["--only", "fedavg"], "'fedavg' matches none of the cells"),
        ({}, ["--jobs", "0"], "--jobs 0: must be at least 1"),
        ({}, ["--ranks", "0"], "--ranks 0: must be at least 1"),
        ({}, ["--ranks", "5000"], "--ranks 5000: one machine starts at most 4096"),
        ({}, ["--seeds", "3"], "--seeds 3: the table has 2"),
        ({}, ["-s", "training.lr=-1"], "FedAvg/few: training.lr = -1"),
        ({}, ["--cell", "8"], "--cell 8: there are 8 cells; give 0 to 7, in the order that --dry-run shows"),
        ({}, ["--cell", "0", "--failed"], "--failed with --cell, which names what is run; leave --failed out"),
        ({}, ["--cell", "-1"], "--cell -1: there are 8 cells"),
        ({}, ["--cell", "0,x"], "--cell 0,x: there are 8 cells"),
        ({}, ["--cell", "5-2"], "--cell 5-2: there are 8 cells"),
        ({}, ["--cell", "0,5-2"], "--cell 0,5-2: there are 8 cells"),
        ({}, ["--cell", "0", "--jobs", "2"], "--jobs 2 with --cell, which is one run at a time; leave --jobs out"),
        ({}, ["--launcher", "sh -c", "--ranks", "2"], "give their number to the launcher, and leave --ranks out"),
        ({}, ["--launcher", "no-such-program -n 2"], "there is no program 'no-such-program' here"),
        ({}, ["--launcher", "sh 'a"], "cannot be read as words: No closing quotation; close the quotes"),
    ],
)
def test_what_is_wrong_is_found_before_anything_starts(changes, words, expected, tmp_path, capfd):
    assert main(["sweep", str(table_file.write(tmp_path, **changes)), *words]) == 2
    assert expected in capfd.readouterr().err
    assert not Path("sweeps").exists()


def test_a_sweep_under_a_launcher_is_refused(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    assert main(["sweep", str(table_file.write(tmp_path))]) == 2
    assert "mpi has started this; start it without a launcher" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, rows, ranks", [(signal.SIGINT, ["FedAvg", "Local"], 1), (signal.SIGTERM, ["Local"], 2)]
)
def test_a_stopped_sweep_leaves_no_process_and_resumes(number, rows, ranks, tmp_path):
    path = table_file.write(
        tmp_path,
        seeds=[0],
        columns={"few": {"training": {"rounds": 100_000}}},
        rows={row: table_file.TABLE["rows"][row] for row in rows},
    )
    runs = [Path("sweeps/small") / row / "few" / "seed0" for row in rows]
    sweep = [*processes.PFLMPI, "sweep", str(path), "--jobs", str(len(rows)), "--ranks", str(ranks)]
    process = processes.launch(sweep)
    try:
        processes.wait_for(
            lambda: all(run_folder.rounds(run)[-1:] > [0] for run in runs) or process.poll() is not None, "both runs"
        )
        started = processes.descendants(process.pid)
        assert len(started) >= len(rows) * ranks
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=60)
    finally:
        processes.kill_all(process.pid)
    assert process.returncode == (130 if number == signal.SIGINT else 75), err
    assert "the same command goes on" in err and out == ""
    assert not any(alive(pid) for pid in started)
    stopped, _ = verify.find_newest_good(runs[0])
    enough = ["--only", f"{rows[0]}/*", "-s", f"training.rounds={stopped + 1}"]
    assert main(["sweep", str(path), "--ranks", "1", *enough]) == 0
    assert [int(line["round"]) for line in metrics_file.read(runs[0])] == list(range(1, stopped + 2))
