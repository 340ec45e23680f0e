"""RUN/events.jsonl: one line for each event, appended, whole, written once a round."""

import errno
import json
import logging

import pytest

import quick_run
from pflmpi.errors import Stopped, TransportError
from pflmpi.runtime import rounds
from pflmpi.store import events_file

ON = {"events": True}


def events(run):
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def kinds(run):
    return [(event["event"], event.get("round")) for event in events(run)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_has_a_line_for_each_event_and_the_same_results(tmp_path, ranks):
    without = quick_run.run(quick_run.settings(checkpoint={"every": 2}), tmp_path / "without", ranks)
    run = tmp_path / "run"
    assert quick_run.run(quick_run.settings(output=ON, checkpoint={"every": 2}), run, ranks) == without
    assert not (tmp_path / "without" / "events.jsonl").exists()
    assert [kind for kind in kinds(run) if kind[0] != "checkpoint"] == [
        ("start", 0),
        *(("round", number) for number in (1, 2, 3)),
        ("end", None),
    ]
    assert sorted(kind for kind in kinds(run) if kind[0] == "checkpoint") == [("checkpoint", n) for n in (0, 2, 3)]
    first, *_, last = events(run)
    assert first["ranks"] == ranks and (last["exit_code"], last["text"]) == (0, None)
    assert events_file.exit_code(run) == 0
    times = [event["time"] for event in events(run)]
    assert all(isinstance(time, float) for time in times)


def test_a_continuation_appends_and_drops_half_a_line(tmp_path):
    run = tmp_path / "run"
    quick_run.run(quick_run.settings(output=ON), run)
    before = (run / "events.jsonl").read_bytes()
    with open(run / "events.jsonl", "ab") as file:
        file.write(b'{"event": "rou')
    quick_run.resume(run, ("training.rounds=4",))
    after = (run / "events.jsonl").read_bytes()
    assert after.startswith(before)
    new = [kind for kind in kinds(run)[before.count(b"\n") :] if kind[0] != "checkpoint"]
    assert new == [("restart", 3), ("round", 4), ("end", None)]
    quick_run.resume(run, ("training.rounds=5", "output.events=false"))
    assert (run / "events.jsonl").read_bytes() == after


@pytest.mark.parametrize(
    ("error", "lost", "code"),
    [(TransportError("rank 1 was lost"), True, 3), (Stopped("a signal"), False, 75), (ValueError("x"), False, 3)],
)
def test_the_end_says_why_with_the_exit_code(error, lost, code, tmp_path, monkeypatch):
    run = tmp_path / "run"

    def ends(*arguments):
        logging.getLogger("pflmpi.runtime.rounds").warning("something is odd")
        raise error

    monkeypatch.setattr(rounds, "run", ends)
    with pytest.raises(type(error)):
        quick_run.run(quick_run.settings(output=ON), run)
    assert [kind for kind, _ in kinds(run)] == ["start", "warning", *["lost_rank"] * lost, "end"]
    assert events(run)[1]["text"] == "something is odd"
    assert events(run)[-1] | {"time": 0} == {"event": "end", "time": 0, "exit_code": code, "text": str(error)}
    assert events_file.exit_code(run) == code
    logging.getLogger("pflmpi").warning("after the end")
    assert len(events(run)) == 3 + lost


def test_a_round_is_written_at_once_and_a_full_disk_stops_no_run(tmp_path, monkeypatch, caplog):
    writes, append = [], events_file.append
    monkeypatch.setattr(events_file, "append", lambda run, events: (writes.append(len(events)), append(run, events)))
    quick_run.run(quick_run.settings(output=ON), tmp_path / "run")
    assert len(writes) == 1 + 3 + 1

    def full(run, events):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(events_file, "append", full)
    quick_run.run(quick_run.settings(output=ON), tmp_path / "full")
    (warning,) = [record.getMessage() for record in caplog.records if "tracker " in record.getMessage()]
    assert "the tracker events fails: [Errno 28] No space left on device; the run goes on without it" in warning
