"""What the noise of `uplink` guarantees: held against closed forms, or a reason why nothing is stated."""

import math
import re

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

import quick_run
from pflmpi.cluster.status import describe_folder
from pflmpi.config import stored, yaml_file
from pflmpi.experiment import privacy, stored_config
from pflmpi.experiment.fork import fork
from planned_run import planned

EVEN = {"name": "iid", "clients": 10}  # all clients have as many samples
NOISY = {"clip": 1.0, "noise": 2.0, "delta": 1e-3}


def settings(**sections):
    base = {"algorithm": {"name": "fedavg", "weighting": "clients"}, "uplink": NOISY, "partition": EVEN}
    return quick_run.settings(base, **{"training": {"rounds": 4, "participation": 0.5}, **sections})


def statement(**sections):
    return privacy.statement(planned(settings(**sections), 1).experiment)


def epsilons(text):
    return [float(number) for number in re.findall(r"(?:epsilon = |, )(\d+\.\d+) against", text)]


def exact(noise, rounds, delta, share=1.0):
    """Epsilon of so many Gaussian mechanisms (Balle and Wang, ICML 2018, theorem 8): they are one with less noise.

    Args:
        noise: over sensitivity.
        share: of clients that are drawn, for one round (Balle, Barthe and Gaboardi, NeurIPS 2018, theorem 9).
    """
    shift = math.sqrt(rounds) / noise

    def excess(epsilon):
        left = norm.cdf(shift / 2 - epsilon / shift)
        return left - math.exp(epsilon + norm.logcdf(-shift / 2 - epsilon / shift)) - delta / share

    return math.log1p(share * math.expm1(brentq(excess, 0, 1000)))


def test_epsilon_of_each_message_and_of_the_means_bounds_the_closed_form_closely():
    per_message, mean = epsilons(statement(training={"rounds": 9, "participation": 1.0}))
    assert 1 < per_message / exact(2.0 / 2, 9, 1e-3) < 1.2, "a change of norm 1 moves by 2, with noise 2"
    assert 1 < mean / exact(2.0 * math.sqrt(10) / 2, 9, 1e-3) < 1.3, "the noise of ten clients adds up"


def test_clients_are_counted_for_the_rounds_that_they_take_part_in():
    often = epsilons(statement(training={"rounds": 9, "participation": 0.5}))[0]
    participation = planned(settings(training={"rounds": 9, "participation": 0.5}), 1).setup.executor.participation
    most = participation.counts(9).max()
    assert most < 9 and 1 < often / exact(1.0, most, 1e-3) < 1.2


def test_uniform_draws_that_nobody_knows_amplify():
    few = {"partition": {**EVEN, "clients": 40}, "training": {"rounds": 1, "participation": 0.1}}
    _, mean = epsilons(text := statement(**few))
    assert text.endswith("against whoever sees the means alone and does not know who was drawn")
    noise = 2.0 * math.sqrt(4) / 2
    assert exact(noise, 1, 1e-3, share=0.1) < mean < exact(noise, 1, 1e-3)
    *_, epsilon = epsilons(text := statement(**{**few, "training": {**few["training"], "selection": "round_robin"}}))
    assert text.endswith("against whoever sees the means alone") and epsilon >= exact(noise, 1, 1e-3)
    dropping = {**few["training"], "rounds": 6, "dropout": 0.3}
    assert "drawn" not in statement(**{**few, "training": dropping}), "not always as many"


def test_fewer_participants_add_less_noise():
    training = {"rounds": 6, "participation": 1.0, "dropout": 0.4}
    participation = planned(settings(training=training), 1).setup.executor.participation
    fewest = min(len(participation.participants(round)) for round in range(1, 7))
    most = participation.counts(6).max()
    assert fewest < 10
    assert 1 < epsilons(statement(training=training))[1] / exact(math.sqrt(fewest), most, 1e-3) < 1.3


def test_means_by_samples_have_no_guarantee_unless_all_have_as_many():
    by_samples = {"algorithm": {"name": "fedavg", "weighting": "samples"}}
    uneven = {"partition": {"name": "dirichlet", "clients": 7, "beta": 0.5}}
    text = statement(**by_samples, **uneven)
    assert len(epsilons(text)) == 1 and "none is stated against whoever sees the means alone" in text
    same = {"data": {"name": "digits", "limit": 400, "test_share": 0.25}, "partition": EVEN}
    sizes = planned(settings(**same), 1).experiment.federation.num_train
    assert (len(epsilons(statement(**by_samples, **same))) == 2) == (len(np.unique(sizes)) == 1)
    assert len(epsilons(statement(**uneven))) == 2


@pytest.mark.parametrize("key, value", [("top_k", 0.1), ("quantise", 8)])
def test_means_of_messages_that_are_cut_after_the_noise_have_no_guarantee(key, value):
    """A value that one client alone has sent has that client's noise alone."""
    text, epsilon = statement(uplink={**NOISY, key: value}), epsilons(statement())[0]
    assert epsilons(text) == [epsilon]
    assert f"none is stated against whoever sees the means alone, because uplink.{key} follows" in text


def test_no_rounds_tell_nothing():
    assert statement(training={"rounds": 0}).endswith("no epsilon is stated, because there are none")


def test_noise_of_next_to_nothing_guarantees_nothing():
    text = statement(uplink={**NOISY, "noise": 1e-170})
    assert "epsilon = inf against whoever sees each message, inf against" in text


def test_delta_is_one_over_the_clients_unless_given():
    assert "(delta = 0.1)" in statement(uplink={"clip": 1.0, "noise": 2.0, "delta": None})
    assert statement(uplink={"clip": 1.0, "noise": None, "delta": None}) == ""


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"data": {"name": "digits", "limit": 400, "normalize": "standard"}}, "data.normalize computes"),
        ({"data": {"name": "digits", "limit": 400, "normalize": "pixel"}}, "data.normalize computes"),
        ({"training": {"rounds": 4, "stop": {"metric": "accuracy_mean", "patience": 2}}}, "training.stop ends the run"),
        ({"training": {"rounds": 4, "selection": "by_samples"}}, "selection = by_samples may draw clients by what"),
        ({"runtime": {"client_errors": "skip"}}, "runtime.client_errors: skip shows whose update failed"),
    ],
)
def test_where_more_than_noisy_messages_depends_on_a_client_no_epsilon_is_stated(sections, why):
    text = statement(**sections)
    assert f"no epsilon is stated, because {why}" in text or f"because training.{why}" in text
    assert not epsilons(text)


def test_a_fork_states_nothing_of_the_rounds_before_it(tmp_path):
    quick_run.run(settings(), tmp_path / "run")
    fork(tmp_path / "run", tmp_path / "fork", 2, {**stored_config.values(tmp_path / "run"), "uplink": {}})
    assert "privacy" not in stored.read(tmp_path / "fork")["recorded"]
    fork(tmp_path / "run", tmp_path / "again", 2, stored_config.values(tmp_path / "run"))
    quick_run.resume(tmp_path / "again")
    assert "no epsilon is stated, because the run is a fork" in stored.read(tmp_path / "again")["recorded"]["privacy"]


def test_rounds_without_an_epsilon_have_none_after_a_resume_either(tmp_path):
    run, stop = tmp_path / "run", {"metric": "accuracy_mean", "patience": 1}
    quick_run.run(settings(training={"rounds": 2, "stop": stop}), run)
    for rounds in (3, 4):
        quick_run.resume(run, (f"training.rounds={rounds}", "training.stop=null"))
        text = stored.read(run)["recorded"]["privacy"]
        assert "no epsilon is stated, because training.stop" in text and f"{rounds} rounds" in text


def test_without_the_accountant_its_extra_is_named(monkeypatch):
    monkeypatch.setattr(privacy, "find_spec", lambda name: None)
    assert statement().endswith("which is not installed: pip install 'pflmpi[privacy]'")


def test_it_is_logged_recorded_and_shown_and_grows_with_a_resume(tmp_path, caplog, capsys):
    run = tmp_path / "run"
    quick_run.run(settings(), run, 2)
    first = stored.read(run)["recorded"]["privacy"]
    assert first == statement() and caplog.messages.count(first) == 1
    assert first in "\n".join(describe_folder(run, {"PATH": str(tmp_path)}))
    quick_run.resume(run, ("training.rounds=8",), 1)
    second = stored.read_verified(run)[0]["recorded"]["privacy"]
    assert second == statement(training={"rounds": 8, "participation": 0.5}) and epsilons(second) > epsilons(first)
    (run / "config.yaml").unlink()
    assert stored.read(run)["recorded"]["privacy"] == second, "checkpoints have it too"
    (tmp_path / "config.yaml").write_text(yaml_file.dump(settings()))
    assert quick_run.command(["plan", str(tmp_path / "config.yaml")]) == 0
    assert first in " ".join(capsys.readouterr().out.split())
