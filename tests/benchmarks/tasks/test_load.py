"""The tasks of the benchmarks: what they are scored by, and that each can be trained narrow and wide."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.replay.record import SAMPLED_WITH
from benchmarks.replay.record import build as build_at
from benchmarks.replay.record import train as train_group
from benchmarks.result_files import DEFAULT_DATA
from benchmarks.tasks.load import NEEDS, ON_GPU, TASKS, load_task
from benchmarks.tasks.task import objective
from benchmarks.vs_asha.search import configurations, seeds
from benchmarks.vs_asha.training import build
from fusion.optim import optimizer
from surrogate import make_surrogate

NOWHERE = Path("/nowhere")


@pytest.mark.parametrize("kind", ["class", "token", "field"])
def test_weights_split_held_examples_into_validation_and_test(kind: str) -> None:
    """2 validation and 6 test examples: the mean over all of score x weight is the mean over each part."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, 5, 4, generator=generator)
    target = inputs + 1 if kind == "field" else torch.randint(4, (8, 5), generator=generator)
    if kind == "class":
        inputs, target = inputs[:, 0], target[:, 0]
    weights = torch.tensor([[4.0, 0.0]] * 2 + [[0.0, 8 / 6]] * 6)
    model = torch.nn.Identity()
    both = objective(kind)(model, (inputs, target, weights))
    for part, name in ((slice(0, 2), "score"), (slice(2, 8), "test")):
        x, y = inputs[part], target[part]
        if kind == "class":
            expected = (x.argmax(-1) == y).float().mean()
        elif kind == "field":
            expected = torch.tensor(1.0)
        else:
            expected = torch.nn.functional.cross_entropy(x.reshape(-1, 4), y.flatten())
        assert both[name].item() == pytest.approx(expected.item(), abs=1e-6)


def test_turbulence_is_split_by_flow_and_its_autoencoder_gives_fields_back() -> None:
    task = load_task("turbulence", NOWHERE, reduced=True)
    fields, _ = task.train
    assert fields.shape == (2 * 8 * 4, 1, 32, 32)
    assert task.model_fn({}, 1.0)(fields[:3]).shape == (3, 1, 32, 32)
    assert task.model_fn({}, 1 / 8)(fields[:3]).shape == (3, 1, 32, 32)
    weights = task.held[-1]
    assert weights.mean(0).tolist() == pytest.approx([1.0, 1.0])
    assert ((weights > 0).sum(1) == 1).all()


@pytest.mark.parametrize(("name", "shape"), [("cifar10_resnet18", (4, 10)), ("shakespeare_gpt", (4, 32, 65))])
def test_a_task_for_a_gpu_trains_at_both_widths(name: str, shape: tuple[int, ...]) -> None:
    """On the CPU, a few of its examples; the GPU itself is what the task asks for."""
    if not (Path(DEFAULT_DATA) / NEEDS[name]).exists():
        pytest.skip(f"no {NEEDS[name]} in {DEFAULT_DATA}; HYDRO_RASDA_DATA names the folder")
    task = load_task(name, Path(DEFAULT_DATA), reduced=True)
    assert task.device == "cuda"
    assert task.held[-1].mean(0).tolist() == pytest.approx([1.0, 1.0])
    task = replace(task, device="cpu")
    config = {**configurations(task, 0)[0], "lr": task.lr[0]}
    batch = tuple(part[:4] for part in task.train)
    narrow = make_surrogate(task.model_fn, config, 1 / 8, example_input=batch[0])
    full = build(task, config, seeds(task, 0, 0))
    assert sum(p.numel() for p in narrow.parameters()) < sum(p.numel() for p in full.parameters()) / 30
    for model in (narrow, full):
        assert model(batch[0]).shape == shape
        update, losses = optimizer(model, config), []
        for _ in range(2):
            loss = objective(task.kind)(model, batch)["loss"]
            update.zero_grad()
            loss.backward()
            update.step()
            losses.append(loss.item())
        assert losses[1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", [task for task in TASKS if task not in ON_GPU])
def test_each_task_trains_at_both_ends_of_its_widths(name: str) -> None:
    try:
        task = TASKS[name](Path(DEFAULT_DATA), True)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert task.name == name
    inputs, weights = task.train[0], task.held[-1]
    assert weights.mean(0).tolist() == pytest.approx([1.0, 1.0])
    assert task.held[0].shape[1:] == inputs.shape[1:]
    config = configurations(task, SAMPLED_WITH)[0]
    few = replace(
        task,
        max_t=1,
        train=tuple(part[: 2 * config["batch_size"]] for part in task.train),
        held=tuple(torch.cat([part[:4], part[-4:]]) for part in task.held),
    )
    for width in (1 / 8, 1.0):
        scores = train_group(few, {0: config, 1: config}, width, 0).scores
        assert np.isfinite(scores).all()
    sizes = [sum(p.numel() for p in build_at(task, 0, config, width, 0).parameters()) for width in (1 / 8, 1.0)]
    assert sizes[0] < sizes[1] / 7


@pytest.mark.parametrize("name", ["breast_cancer", "diabetes"])
def test_tables_are_split_by_seed_and_seeds_fifteen_apart_alike(name: str) -> None:
    once, often = load_task(name, NOWHERE), load_task(f"{name}_splits", NOWHERE)
    assert once.of_seed(7) is once
    first, other, again = (often.of_seed(seed) for seed in (0, 1, 16))
    assert torch.equal(first.train[0], once.train[0])
    assert torch.equal(first.held[0], once.held[0])
    assert (other.split, again.split) == (1, 1)
    assert torch.equal(other.held[0], again.held[0])
    assert not torch.equal(first.held[0], other.held[0])
    for one in (first, other):
        assert one.held[-1].sum(0).tolist() == pytest.approx([len(one.held[0])] * 2)
        assert one.train[0].mean(0).abs().max() < 1e-6


def test_unknown_tasks_and_missing_data_are_named() -> None:
    with pytest.raises(ValueError, match="task is 'mnist', but must be one of"):
        load_task("mnist", NOWHERE)
    with pytest.raises(FileNotFoundError, match=r"cifar10_jpeg\.npz is missing"):
        load_task("cifar10", NOWHERE)
    assert {*ON_GPU} < {*TASKS}
    assert {*NEEDS} < {*TASKS}
