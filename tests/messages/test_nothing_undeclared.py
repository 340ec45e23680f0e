"""What travels is what an algorithm declares: counted on every transport call, and searched for what must stay."""

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import quick_run
from every_algorithm import every_algorithm
from pflmpi import tree
from pflmpi.algorithms.base import Algorithm
from pflmpi.algorithms.fedgmh import FedGMH
from pflmpi.config import load as configuration
from pflmpi.experiment.build import Experiment, prepare, setup
from pflmpi.experiment.run import RankContext, run
from pflmpi.learning.participation import Participation
from pflmpi.learning.task import Task
from pflmpi.learning.training import TrainingConfig
from pflmpi.messages.groups import clients_of
from pflmpi.messages.kinds import NOBODY, ClassMeans, Mean, Own, OwnClasses, Rows, Shared, Sum
from pflmpi.models import MODELS
from pflmpi.runtime.placement import Placement
from pflmpi.runtime.progress import Progress
from pflmpi.store import config_file, run_folder
from pflmpi.transports.peers import Peer
from recorder import Payload, Recorder
from thread_transport import run_ranks

RANKS, ROUNDS, CLIENTS = 3, 3, 7
AGREE = 8  # bytes of an exit code, from each rank, in each of the eight steps of a start


@dataclass(frozen=True)
class Recorded:
    """One run on threads, with all that left a rank."""

    folder: Path
    experiment: Experiment
    placement: Placement
    sent: list[Payload]
    progress: list[Progress]

    def content(self, purpose: str, *, up: bool) -> list[bytes]:
        return [payload.content for payload in self.sent if payload.purpose == purpose and payload.down != up]

    def total(self, purpose: str, *, up: bool) -> int:
        return sum(map(len, self.content(purpose, up=up)))


def record(folder, case):
    """Run on `RANKS` threads that are ranks, of which rank 0 computes clients too."""
    raw = quick_run.settings(
        case,
        partition={"name": "dirichlet", "clients": CLIENTS, "beta": 0.3, "min_samples": 8},  # unlike numbers of classes
        training={"rounds": ROUNDS},
        checkpoint={"every": 1, "keep": 0},
        runtime={"executor": "loop"},  # every client is a group of its own, so that all ranks have some
    )
    config = configuration.parse(raw)
    torch.set_num_threads(1)
    experiment = prepare(config, torch.device("cpu"))
    progress: list[Progress] = []

    def work(inner):
        transport = Recorder(inner)
        transport.peers = [Peer(f"node{rank}", rank) for rank in range(RANKS)]  # each writes its clients' rows itself
        place = RankContext(transport, torch.device("cpu"), slots=RANKS)
        run(config, folder, place, progress.append)
        return transport.sent

    sent = [payload for rank_sent in run_ranks(RANKS, work) for payload in rank_sent]
    return Recorded(folder, experiment, setup(experiment, RANKS, RANKS).placement, sent, progress)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return {name: record(tmp_path_factory.mktemp("recorded") / "run", case) for name, case in every_algorithm().items()}


def participants(run, round):
    config = run.experiment.config
    return Participation(config.training, config.seed, np.ones(CLIENTS)).participants(round)


def rank_of(run, clients):
    return {int(c): rank for rank, groups in enumerate(run.placement.assign(clients)) for c in clients_of(groups)}


def size(like):
    return sum(leaf.numel() * leaf.element_size() for _, leaf in tree.leaves(like))


def expected_up(run):
    """The bytes that follow from the declared kinds alone."""
    task, total = run.experiment.tasks[0], 0
    num_held = (run.experiment.federation.class_counts > 0).sum(1)
    senders = [participants(run, round) for round in range(1, ROUNDS + 1)]
    if run.experiment.config.algorithm.introduces:
        senders.append(np.arange(CLIENTS))
    for chosen in senders:
        away = [client for client, rank in rank_of(run, chosen).items() if rank != 0]
        for kind in run.experiment.config.algorithm.uplink(task).values():
            if isinstance(kind, ClassMeans):
                total += sum(int(num_held[c]) * (4 + 4 * kind.num_features + 4 * kind.counts) for c in away)
            elif not getattr(kind, "kept", False):
                assert type(kind) in (Rows, Sum, Mean)
                folded_there = type(kind) in (Sum, Mean) and len(set(rank_of(run, chosen).values())) == 1
                total += min(len(away), 1 if folded_there else len(away)) * size(kind.like)
    return total


def receivers(run, round):
    """Who gets rows of its own after a round: who trains next, and all where they are tested with such rows."""
    algorithm, task = run.experiment.config.algorithm, run.experiment.tasks[0]
    kinds = [algorithm.downlink(task)[name] for name in algorithm.predicts_with]
    if any(type(kind) is not Shared for kind in kinds):
        return np.arange(CLIENTS)
    return participants(run, round + 1) if round < ROUNDS else np.empty(0, np.int64)


def expected_down(run):
    task, total = run.experiment.tasks[0], 0
    holds = run.experiment.federation.class_counts > 0
    for round in range(ROUNDS + 1):  # once before the first round, and once after each
        by_rank: dict[int, list[int]] = defaultdict(list)
        for client, rank in rank_of(run, receivers(run, round)).items():
            by_rank[rank].append(client)
        answered = list(rank_of(run, participants(run, round)).values()) if round else []
        for kind in run.experiment.config.algorithm.downlink(task).values():
            for rank in range(1, RANKS):
                if isinstance(kind, Own) and kind.of:
                    continue
                if isinstance(kind, Own) and kind.kept:
                    rows = answered.count(rank)
                elif isinstance(kind, OwnClasses):
                    rows = int(holds[by_rank[rank]].any(0).sum()) if by_rank[rank] else 0
                else:
                    assert type(kind) in (Shared, Own)
                    rows = len(by_rank[rank]) if isinstance(kind, Own) else 1
                total += rows * size(kind.like)
            if isinstance(kind, Own) and kind.of:
                total += kept_bytes(run, kind, round, by_rank)
    return total


def kept_bytes(run, kind, round, by_rank):
    """To every rank whose rows go where; to each, once, those of clients that live elsewhere."""
    home, everyone = (
        rank_of(run, np.arange(CLIENTS)),
        sorted(client for clients in by_rank.values() for client in clients),
    )
    total, count = 0, kind.like["clients"].shape[0]
    if everyone:  # who trains next has kept whose models it was sent
        (ids, state) = run_folder.read_clients(run.folder, round + 1, np.array(everyone))["cohort0"]
        assert ids.tolist() == everyone
        total += (RANKS - 1) * len(everyone) * count * 8
        for rank, clients in by_rank.items():
            wanted = set(state["mix/clients"][np.isin(ids, clients)].ravel().tolist()) - {NOBODY}
            total += sum(home[client] != rank for client in wanted) * size(kind.like["model"]) // count
    return total


@pytest.mark.parametrize("name", every_algorithm())
def test_messages_carry_exactly_what_is_declared(name, recorded):
    run = recorded[name]
    assert len(set(rank_of(run, np.arange(CLIENTS)).values())) == RANKS, "every rank has clients"
    assert run.total("message", up=True) == expected_up(run)
    assert run.total("message", up=False) == expected_down(run)
    assert (run.total("message", up=True) > 0) == (name != "local")


@pytest.mark.parametrize("name", every_algorithm())
def test_wire_bytes_in_the_metrics_are_those_that_moved(name, recorded):
    run = recorded[name]
    for way, up in (("wire_up", True), ("wire_down", False)):
        assert sum(int(progress.bytes[way]) for progress in run.progress) == run.total("message", up=up), way


@pytest.mark.parametrize("name", every_algorithm())
def test_beside_messages_scores_and_times_alone_travel(name, recorded):
    run = recorded[name]
    algorithm = run.experiment.config.algorithm
    may_change = bool(algorithm.predicts_with) or type(algorithm).adapt is not Algorithm.adapt
    expected: dict[int, list[np.ndarray]] = {rank: [] for rank in range(1, RANKS)}  # tested clients, by rank and round
    trained: dict[int, list[np.ndarray]] = {rank: [] for rank in range(1, RANKS)}
    for round in range(1, ROUNDS + 1):
        everyone = may_change or round == 1
        tested = np.arange(CLIENTS) if everyone else participants(run, round)
        where = rank_of(run, tested) if run.placement.home is not None else None
        for rank, lists in expected.items():
            groups = run.placement.assign(tested, tested=True)[rank]
            lists.append(clients_of(groups))
            assert where is None or all(where[int(c)] == rank for c in clients_of(groups))
            trained[rank].append(
                np.array([c for c, at in rank_of(run, participants(run, round)).items() if at == rank])
            )
    progress_by_round = {one.round: one for one in run.progress}
    k = run.experiment.federation.dataset.num_classes
    for rank, lists in expected.items():
        contents = [one.content for one in run.sent if one.sender == rank and one.purpose == "control"]
        (length, hashes), scores, end = contents[:2], contents[2:-1], contents[-1]
        assert len(end) == 8 and 0 < float(np.frombuffer(end)[0]) < 1e6  # seconds of processor time
        agreed = [len(one.content) for one in run.sent if one.sender == rank and one.purpose == "agreement"]
        assert agreed == [AGREE] * 8
        assert int.from_bytes(length, "little") == len(hashes)
        assert all(re.fullmatch(r"[0-9a-f]{64}|[\w.+ ]{1,40}", value) for value in json.loads(hashes).values())
        sizes = [5 + (2 * k + 1) * len(tested) + len(own) for tested, own in zip(lists, trained[rank], strict=True)]
        assert [len(one) for one in scores] == [8 * one for one in sizes]
        for round, (content, tested) in enumerate(zip(scores, lists, strict=True), start=1):
            (trained_for, tested_for, memory, longest, wish), rest = np.split(np.frombuffer(content), [5])
            assert 0 <= longest < 60 and wish == 0
            assert 0 <= trained_for < 60e6 and 0 <= tested_for < 60e6  # microseconds
            assert 0 < memory < 2**40
            counts, losses = np.split(rest, [(2 * k + 1) * len(tested)])
            hits, predicted, loss = np.split(counts.reshape(-1, 2 * k + 1), [k, 2 * k], axis=1)
            recorded_scores = progress_by_round[round].scores
            for sent, recorded_as in (
                (hits, recorded_scores.hits),
                (predicted, recorded_scores.predicted),
                (loss[:, 0], recorded_scores.loss),
            ):
                assert np.array_equal(sent, recorded_as[tested])
            here = np.isin(participants(run, round), trained[rank][round - 1])
            assert np.array_equal(losses, progress_by_round[round].train_loss[here], equal_nan=True)
    down = run.content("control", up=False)
    expected_down = []
    lock = down[5 * (RANKS - 1)][:16].decode()  # the token of the run's lock
    assert re.fullmatch(r"[0-9a-f]{16}", lock)
    texts = (str(run.folder), run.experiment.config.runtime.executor, f"{lock} {config_file.run_id(run.folder)}")
    for text in texts:  # once, to each rank, after its length
        expected_down += [len(text).to_bytes(8, "little")] * (RANKS - 1) + [text.encode()] * (RANKS - 1)
    *texts_sent, lengths, more_lengths, same, also_same = down[: -ROUNDS * (RANKS - 1)]
    assert texts_sent == expected_down
    assert lengths == more_lengths and len(lengths) == 8 * RANKS  # of what all ranks have made of the configuration
    assert same == also_same == bytes(8)  # it is the same: no error
    for content in down[-ROUNDS * (RANKS - 1) :]:  # after each round
        longest, wish = np.frombuffer(content)
        assert 0 < longest < 60 and wish == 0


def test_fedgmh_uploads_labels_and_means_and_nothing_else(recorded):
    """The payload is decoded here without the product: labels int32 of all clients, then their means float32 [., d]."""
    run = recorded["fedgmh-full"]
    federation = run.experiment.federation
    d, checked = run.experiment.tasks[0].num_features, 0
    for round in range(1, ROUNDS + 1):
        chosen = participants(run, round)
        clients = run_folder.read_clients(run.folder, round, chosen)
        ids, state = next(iter(clients.values()))
        for rank in range(1, RANKS):
            senders = [c for c, at in rank_of(run, chosen).items() if at == rank]
            if not senders:
                continue
            contents = [p.content for p in run.sent if p.sender == rank and p.purpose == "message"]
            with_clients = [r for r in range(1, ROUNDS + 1) if rank in rank_of(run, participants(run, r)).values()]
            content = contents[with_clients.index(round)]
            total = int((federation.class_counts[senders] > 0).sum())
            all_labels, content = np.frombuffer(content[: 4 * total], np.int32), content[4 * total :]
            for client in sorted(senders):
                classes, row = np.flatnonzero(federation.class_counts[client]), list(ids).index(client)
                labels, all_labels = all_labels[: len(classes)], all_labels[len(classes) :]
                means, content = content[: 4 * d * len(classes)], content[4 * d * len(classes) :]
                assert labels.tolist() == classes.tolist()
                samples = federation.train[client]
                x = (federation.dataset.images[samples].reshape(len(samples), -1) / 255 - 0.5) / 0.5
                weight, bias = state["model/body/fc1/weight"][row], state["model/body/fc1/bias"][row]
                z = np.maximum(x @ weight.T.astype(np.float64) + bias, 0)
                of = federation.dataset.labels[samples]
                means_here = np.stack([z[of == label].mean(0) for label in classes])
                # 1e-5: float32 features of magnitude one, averaged.
                np.testing.assert_allclose(np.frombuffer(means, np.float32).reshape(-1, d), means_here, atol=1e-5)
                checked += 1
            assert content == b""
    assert checked >= ROUNDS


def found_in(needles, hay):
    return sum(any(needle in content for content in hay) for needle in needles)


def head_rows(run):
    """Every row of every head that a client had after a round, except what all share from the start."""
    rows = []
    for round in range(1, ROUNDS + 1):
        for _, state in run_folder.read_clients(run.folder, round, participants(run, round)).values():
            rows += [row.tobytes() for head in state["model/head/weight"] for row in head]
    return rows


@pytest.mark.parametrize("name", [name for name in every_algorithm() if name.startswith("fedgmh")])
def test_no_head_no_image_and_no_count_leaves_a_client_with_fedgmh(name, recorded):
    run = recorded[name]
    federation = run.experiment.federation
    up = run.content("message", up=True) + run.content("control", up=True)
    assert found_in(head_rows(run), up) == 0
    images = federation.dataset.images
    prepared = run.experiment.tasks[0].prepare(torch.from_numpy(images.copy())).numpy()
    assert found_in([image.tobytes() for image in images], up) == 0
    assert found_in([image.tobytes() for image in prepared], up) == 0
    counts = [row[row > 0] for row in federation.class_counts]
    # Two or more counts beside each other; a single small number is in every buffer by chance.
    needles = [row.astype(kind).tobytes() for row in counts if len(row) > 1 for kind in ("i4", "i8", "f4", "f8")]
    assert found_in(needles, up) == 0


def test_the_search_finds_heads_where_they_do_travel(recorded):
    run = recorded["fedamp"]
    rows = head_rows(run)
    assert found_in(rows, run.content("message", up=True)) > len(rows) / RANKS / 2


def task(classes, width):
    architecture = MODELS["mlp"](hidden=width).bind((1, 2, 2), classes)
    return Task(architecture, TrainingConfig(), 4, 0, (0.5,), (0.5,))


def test_fedgmh_bytes_are_those_of_the_paper():
    hundred = FedGMH().uplink(task(100, 512))["means"].client_bytes(100)
    assert hundred == 100 * (4 * 512 + 4) == 205200 and round(hundred / 1024, 2) == 200.39  # KiB up
    ten = FedGMH().downlink(task(10, 512))["heads"]
    assert size(ten.like) == 4 * 5130  # L
    assert ten.client_bytes(100) == 4 * 100 * 5130 and round(ten.client_bytes(100) / 1024) == 2004  # KiB down


def test_fedgmh_bytes_in_the_metrics_follow_from_the_classes_held(recorded):
    run = recorded["fedgmh-full"]
    d, num_classes = 12, 10
    entries = d * num_classes + num_classes  # L
    num_held = (run.experiment.federation.class_counts > 0).sum(1)
    assert len(set(num_held.tolist())) > 1
    for progress in run.progress:
        took_part = np.isin(np.arange(CLIENTS), progress.participants)
        assert progress.bytes["up"].tolist() == (took_part * num_held * (4 * d + 4)).tolist()
        assert progress.bytes["down"].tolist() == (took_part * 4 * num_held * entries).tolist()
