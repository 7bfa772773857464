import math
import tempfile
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from hydro_rasda.backends.ray.rank_worker import RankWorker, run_rank
from tests.hydro_rasda.backends.ray.trainables import job
from tests.hydro_rasda.ranks import on_ranks


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes checkpoints further, and removes them, here."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def worker(connection: Any = None, **changes: Any) -> RankWorker:
    asked = {"config": {"lr": 0.1}, "milestones": (2, 4), **changes}
    return RankWorker(job(**asked), data=None, connection=connection)


def test_a_worker_that_is_taken_for_a_configuration_says_what_it_is() -> None:
    with pytest.raises(TypeError, match=r"given a Worker, no configuration: take worker\.config\['lr'\]"):
        worker()["lr"]


@pytest.mark.parametrize("fixed_global", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_each_sample_is_in_one_batch_of_one_rank(world_size: int, fixed_global: bool) -> None:
    ranks = [worker(rank=r, world_size=world_size) for r in range(world_size)]
    shares = [list(w.batches(101, 10, fixed_global=fixed_global)) for w in ranks]
    assert len({len(share) for share in shares}) == 1
    counted = [i for share in shares for batch, weight in share if weight > 0 for i in batch.tolist()]
    assert sorted(counted) == list(range(101))


def test_the_order_does_not_depend_on_the_number_of_ranks() -> None:
    whole = [batch for batch, _ in worker().batches(32, 8, fixed_global=True)]
    halves = [worker(rank=r, world_size=2).batches(32, 8, fixed_global=True) for r in range(2)]
    for batch, (first, _), (second, _) in zip(whole, *halves):
        assert torch.equal(batch[0::2], first)
        assert torch.equal(batch[1::2], second)


def test_local_batch_stays_and_global_batch_grows() -> None:
    sizes = [[len(batch) for batch, _ in worker(world_size=n).batches(64, 8)] for n in (1, 2, 4)]
    assert sizes == [[8] * 8, [8] * 4, [8] * 2]


@pytest.mark.parametrize("samples", [5, 7, 9])
def test_weights_make_the_mean_over_ranks_the_mean_over_the_global_batch(samples: int) -> None:
    """7 samples on 4 ranks: 2, 2, 2, 1; 5 in batches of 4 leave one rank of four with anything at all."""
    values = torch.arange(10.0)
    ranks = [worker(rank=r, world_size=4).batches(samples, 1) for r in range(4)]
    order = torch.cat([batch for batch, _ in worker().batches(samples, samples)])
    for expected, shares in zip(order.split(4), zip(*ranks)):
        averaged = sum(values[batch].mean() * weight for batch, weight in shares) / 4
        assert averaged == pytest.approx(values[expected].mean().item())


@pytest.mark.parametrize("samples", [130, 131, 135])
def test_no_rank_gets_a_single_example_of_a_small_last_batch(samples: int) -> None:
    """BatchNorm would refuse it, on more workers than those with which the training began."""
    ranks = [[*worker(rank=rank, world_size=4).batches(samples, 32)] for rank in range(4)]
    assert min(len(batch) for own in ranks for batch, _ in own) == 2
    assert sorted(torch.cat([b for own in ranks for b, weight in own if weight]).tolist()) == [*range(samples)]
    assert sum(own[-1][1] for own in ranks) == pytest.approx(4)


def test_the_order_changes_with_the_iteration_and_the_seed() -> None:
    first, later = worker(), worker()
    later.iteration = 1
    orders = [
        next(w.batches(50, 50, seed=seed))[0].tolist() for w, seed in [(first, 0), (first, 0), (later, 0), (first, 1)]
    ]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != orders[3]


def test_saves_where_a_trial_may_pause_and_goes_on_from_there() -> None:
    ours, theirs = Pipe()
    model = nn.Linear(2, 1)
    first = worker(ours, world_size=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    first.rescale(optimizer)
    folders = []
    for _ in range(3):
        theirs.send(None)
        list(first.batches(8, 4))
        first.report({"loss": torch.tensor(0.5)}, lambda: {"model": model.state_dict()})
        kind, (metrics, folder) = theirs.recv()
        assert kind == "report"
        assert metrics == {"loss": 0.5, "workers": 1, "global_batch_size": 4, "lr_multiplier": 1.0}
        folders.append(folder)
    assert [folder is not None for folder in folders] == [False, True, False]  # milestones 2 and 4
    again = worker(checkpoint=folders[1], world_size=2)
    assert again.iteration == 2
    assert again.checkpoint is not None
    assert torch.equal(again.checkpoint["model"]["weight"], model.weight)
    rescaled = again.rescale(SGD(model.parameters(), lr=0.1), warmup_steps=2)
    assert rescaled.multiplier == 1.5  # from the 1 that was saved, half way to 2


def test_growth_is_over_the_workers_that_the_trial_began_with() -> None:
    """If `elastic` was given no scheduler, only the checkpoint knows them."""
    ours, theirs = Pipe()
    saved = report(worker(ours, milestones=(1,)), theirs, {"loss": 1.0})
    again = worker(ours, milestones=(2,), checkpoint=saved, world_size=2, workers=2)
    assert again.growth == 2
    saved = report(again, theirs, {"loss": 1.0})
    assert worker(checkpoint=saved, world_size=4, workers=4).growth == 4


def test_a_function_that_reports_by_another_way_is_refused() -> None:
    """`tune.report` does nothing in a rank: the trial ended without a result, and without an error."""
    ours, _ = Pipe()
    with pytest.raises(RuntimeError, match=r"never called worker\.report; tune\.report tells nothing"):
        run_rank((lambda worker: None, None), job(threads=torch.get_num_threads()), ours)


def ranks_measure(rank: int, world: int, states: list[Any], sized: bool) -> list[Any]:
    """Rank 0's reports of two iterations, and what it saved; three steps each, on data of known covariance."""
    ours, theirs = Pipe()
    w = worker(ours, rank=rank, world_size=world, milestones=(1, 2))
    w._measured = states[-1] if states else {}
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    joint = w.prepare(model)
    optimizer = SGD(model.parameters(), lr=0.0)
    w.measure(joint, optimizer, batch_size=5 if sized else None)
    x = torch.randn(31, 4, generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(2):
        theirs.send(None)
        shares = w.batches(30, 5) if not sized else (((x[:30][i::6]), 1.0) for i in range(rank, 6, 2))
        for batch, weight in shares:
            optimizer.zero_grad()
            (joint(batch if sized else x[batch]).sum() / len(batch) * weight).backward()
            optimizer.step()
        w.report({"loss": 1.0}, {})
        if rank == 0:
            _, (metrics, folder) = theirs.recv()
            found.append((metrics, torch.load(Path(folder, "worker.pt"), weights_only=True)["measured"]))
    return found


@pytest.mark.parametrize("sized", [False, True])
def test_what_is_measured_is_reported_and_goes_on_from_the_checkpoint(sized: bool) -> None:
    """An example's gradient is the example: its noise scale is known."""
    found, nothing = on_ranks(2, ranks_measure, [], sized)
    assert nothing == []
    (first, saved), (second, _) = found
    assert first["scaling_efficiency"] == second["scaling_efficiency"] == 1.0
    assert first.get("global_batch_size") == (None if sized else 10)
    state = saved["noise"]
    assert first["gradient_noise_scale"] == pytest.approx(
        max(0, state["noise"]) / state["signal"] if state["signal"] > 0 else math.inf
    )
    (again, _), _ = on_ranks(2, ranks_measure, [saved], sized)[0]
    if sized:  # the same batches as in the second iteration
        assert again["gradient_noise_scale"] == pytest.approx(second["gradient_noise_scale"])


def test_one_worker_tells_its_efficiency_alone() -> None:
    found = ranks_measure(0, 1, [], sized=False)
    assert [("gradient_noise_scale" in metrics, metrics["scaling_efficiency"]) for metrics, _ in found] == [
        (False, 1.0)
    ] * 2


def unsized(rank: int, world: int) -> None:
    w = worker(rank=rank, world_size=world)
    joint = w.prepare(nn.Linear(2, 1))
    w.measure(joint, SGD(joint.parameters(), lr=0.1))
    joint(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="`batch_size` is None, but must be given to `measure`"):
        w.report({})


def test_the_size_of_steps_must_be_known() -> None:
    on_ranks(2, unsized)


@pytest.mark.parametrize(
    ("milestones", "every", "expected"),
    [((2, 4), None, [2, 4, 5, 6]), ((2, 4), 3, [2, 3, 4, 5, 6]), ((), None, [6]), ((), 2, [2, 4, 6])],
)
def test_when_it_saves(milestones: tuple[int, ...], every: int | None, expected: list[int]) -> None:
    ours, theirs = Pipe()
    w = worker(ours, milestones=milestones, checkpoint_every=every)
    saved = []
    for iteration in range(1, 7):
        theirs.send(None)
        w.report({}, {"x": 1}, final=iteration == 6)
        if theirs.recv()[1][1] is not None:
            saved.append(iteration)
    assert saved == expected


def report(w: RankWorker, theirs: Any, metrics: dict[str, Any]) -> str | None:
    """The folder of the checkpoint that a report made; None where it made none."""
    theirs.send(None)
    w.report(metrics, {"x": 1})
    folder: str | None = theirs.recv()[1][1]
    return folder


@pytest.mark.parametrize("nested", [False, True])
def test_it_saves_where_a_milestone_of_time_attr_is_passed(nested: bool) -> None:
    ours, theirs = Pipe()
    w = worker(ours, milestones=(100, 400, 800), time_attr="ep/n" if nested else "steps")
    saved = []
    for steps in range(130, 1000, 130):
        counted: Any = {"ep": {"n": torch.tensor(steps)}} if nested else {"steps": steps}
        if report(w, theirs, {"loss": 1.0, **counted}):
            saved.append(steps)
    assert saved == [130, 520, 910]
    assert report(w, theirs, {"loss": 1.0}) is None  # no scheduler decides it


def test_it_saves_where_a_metric_is_decided_that_is_not_always_reported() -> None:
    """The milestones are 2, 4 and 8, and the accuracy comes at 3 and 5."""
    ours, theirs = Pipe()
    w = worker(ours, milestones=(2, 4, 8))
    metrics: list[dict[str, Any]] = [
        {"loss": 1.0} | ({"val": {"accuracy": 1.0}} if t in (3, 5) else {}) for t in range(1, 8)
    ]
    folders = {t: report(w, theirs, of) for t, of in enumerate(metrics, start=1)}
    assert [t for t, folder in folders.items() if folder] == [2, 3, 4, 5]
    again = worker(ours, milestones=(2, 4, 8), checkpoint=folders[4])
    assert report(again, theirs, metrics[4])
    assert not report(worker(ours, milestones=(2, 4, 8), checkpoint=folders[5]), theirs, metrics[5])


def test_it_saves_where_a_metric_is_measured_that_is_none_at_other_times() -> None:
    """The milestones are 2, 4 and 8, and the accuracy is measured at 3 and 5."""
    ours, theirs = Pipe()
    w = worker(ours, milestones=(2, 4, 8))
    metrics = [{"loss": 1.0, "accuracy": 1.0 if t in (3, 5) else None} for t in range(1, 8)]
    assert [t for t, of in enumerate(metrics, start=1) if report(w, theirs, of)] == [2, 3, 4, 5]


@pytest.mark.parametrize("steps", [None, "2", math.nan])
def test_what_is_no_number_of_iterations_reaches_no_milestone(steps: object) -> None:
    ours, theirs = Pipe()
    w = worker(ours, milestones=(2, 4), time_attr="steps")
    assert [bool(report(w, theirs, {"steps": t})) for t in (1, steps, 2, 3)] == [False, False, True, False]


def test_a_checkpoint_for_which_there_is_no_room_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker.pt").symlink_to("/dev/full")
    monkeypatch.setattr("hydro_rasda.backends.ray.rank_worker.make_folder", lambda owned_by: str(tmp_path))
    with pytest.raises(OSError, match=r"worker\.pt could not be written, and its disk has \d+ MiB left"):
        worker(milestones=(1,)).report({"loss": 1.0}, {"x": torch.ones(100_000)})


def test_metrics_in_tensors_are_sent_as_numbers() -> None:
    """Another process could open a tensor's memory only with this one's key: it would fail to authenticate."""
    ours, theirs = Pipe()
    theirs.send(None)
    classes = {"accuracy": torch.tensor([0.5, 1.0]), "best": np.float32(0.5)}
    worker(ours).report({"loss": torch.tensor([1.0]), "of": classes, "all": [torch.ones(())]})
    _, (metrics, _) = theirs.recv()
    assert {name: metrics[name] for name in ("loss", "of", "all")} == {
        "loss": 1.0,
        "of": {"accuracy": [0.5, 1.0], "best": 0.5},
        "all": [1.0],
    }


def test_only_rank_0_reports() -> None:
    ours, theirs = Pipe()
    w = worker(ours, rank=1, world_size=2)
    w.report({"loss": 1.0}, {"x": 1})
    assert w.iteration == 1
    assert not theirs.poll()


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    torch.save({"state": print, "iteration": 1, "rescaled": [], "measured": {}}, tmp_path / "worker.pt")
    with pytest.raises(Exception, match="Weights only load failed"):
        worker(checkpoint=str(tmp_path))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("samples", [4, 331])
def test_a_sampler_repeats_no_example(samples: int, shuffle: bool) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(samples))
    shares = [list(worker(rank=r, world_size=4).sampler(data, shuffle=shuffle)) for r in range(4)]
    drawn = [i for share in shares for i in share]
    assert len(set(drawn)) == len(drawn)
    if shuffle:
        assert {len(share) for share in shares} == {samples // 4}  # as DDP needs
    else:
        assert sorted(drawn) == list(range(samples))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="`dataset` is 1, but must be at least 2 examples, one for each rank"):
        worker(world_size=2).sampler(torch.utils.data.TensorDataset(torch.zeros(1)))
    with pytest.raises(ValueError, match="`samples` is 0, but must be an integer from 1 to"):
        next(worker().batches(0, 8))
    with pytest.raises(ValueError, match="`batch_size` is 0, but must be an integer from 1 to"):
        next(worker().batches(8, 0))
