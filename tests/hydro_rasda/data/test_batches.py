from __future__ import annotations

import itertools
import mmap
import pickle
import random
import tempfile
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fusion.streams import seed_generators
from hydro_rasda.data import EVAL_BATCH_FACTOR, Batches, Data, Shard, Share, batch_length, make_batches, move

N = 11
X, Y = torch.arange(2.0 * N).reshape(N, 2), torch.arange(N)
CPU = torch.device("cpu")


def test_the_guide_says_how_many_examples_validation_takes() -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/objective.md").read_text(encoding="utf-8")
    assert f"validation takes {('zero', 'one', 'two', 'three', 'four')[EVAL_BATCH_FACTOR]} times `batch_size`" in guide


def loader(batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch_size, shuffle=True)


def loader_of_one(batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X), batch_size)


FORMS: dict[str, Any] = {
    "tensors": (X, Y),
    "arrays": [X.numpy(), Y.numpy()],
    "dataset": TensorDataset(X, Y),
    "list of examples": list(zip(X, Y)),
    "loader": loader,
}


def read(data: Data, seed: int = 0) -> Batches:
    return make_batches(data, "train_data", CPU, seed)


@pytest.fixture(params=FORMS)
def data(request: pytest.FixtureRequest) -> Data:
    form: Data = FORMS[request.param]
    return form


def targets(batches: Iterator[Any]) -> list[list[int]]:
    return [batch[1].tolist() for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [example for batch in batches for example in batch]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5, 10, 11, 100])
def test_every_example_is_read_once_an_epoch(data: Data, batch_size: int) -> None:
    batches = targets(read(data).epoch(batch_size, 0))
    assert sorted(flat(batches)) == list(range(N))
    assert sorted(flat(targets(read(data).in_order(batch_size)))) == list(range(N))
    assert read(data).steps(batch_size) == len(batches)


def test_inputs_stay_with_their_targets(data: Data) -> None:
    for x, y in read(data).epoch(4, 3):
        assert torch.equal(x, X[y])


def test_order_depends_on_seed_and_epoch_alone(data: Data) -> None:
    one = targets(read(data).epoch(4, 2))
    torch.rand(3)
    assert targets(read(data).epoch(4, 2)) == one
    assert targets(read(data).epoch(4, 3)) != one
    assert targets(read(data, seed=1).epoch(4, 2)) != one


@pytest.mark.parametrize("form", ["tensors", "dataset"])
def test_batch_sizes_share_an_order_and_evaluation_has_none(form: str) -> None:
    assert flat(targets(read(FORMS[form]).epoch(2, 5))) == flat(targets(read(FORMS[form]).epoch(5, 5)))
    assert flat(targets(read(FORMS[form]).in_order(4))) == list(range(N))


def test_a_single_example_joins_the_batch_before_it() -> None:
    assert [len(b) for b in targets(read((X, Y)).epoch(5, 0))] == [5, 6]
    assert [len(b) for b in targets(read((X, Y)).epoch(4, 0))] == [4, 4, 3]
    assert [len(b) for b in targets(read((X[:1], Y[:1])).epoch(4, 0))] == [1]


def test_batches_of_one_tensor_have_one_form() -> None:
    """`batch[0]` is the tensor, not its first example."""
    for data in ((X,), TensorDataset(X), loader_of_one):
        batches = list(read(data).in_order(4))
        assert [len(batch) for batch in batches] == [1] * 3
        assert [len(batch[0]) for batch in batches] == [4, 4, 3]


class Dicts(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": X[i], "y": Y[i]}


def test_batches_of_any_nesting() -> None:
    batches = list(read(Dicts()).epoch(4, 0))
    assert [set(batch) for batch in batches] == [{"x", "y"}] * 3
    assert [batch_length(batch) for batch in batches] == [4, 4, 3]
    moved = move({"x": [X], "name": "kept"}, torch.device("meta"))
    assert moved["x"][0].device.type == "meta"
    assert moved["name"] == "kept"


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(X, Y))


def generated(batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(X.split(batch_size), Y.split(batch_size))


def shuffled_by_numpy(batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    for rows in torch.as_tensor(np.random.permutation(N)).split(batch_size):
        yield X[rows], Y[rows]


def test_a_loader_that_shuffles_with_numpy_is_seeded_too() -> None:
    one = targets(read(shuffled_by_numpy).epoch(4, 2))
    np.random.rand(3)
    assert targets(read(shuffled_by_numpy).epoch(4, 2)) == one
    assert targets(read(shuffled_by_numpy).epoch(4, 3)) != one


@pytest.mark.parametrize("make", [generated, lambda n: DataLoader(Stream(), n)])
def test_a_loader_without_a_length_is_read_too(make: Callable[[int], Any]) -> None:
    batches = read(make)
    assert flat(targets(batches.epoch(3, 0))) == list(range(N))
    assert batches.steps(3) is None


def test_a_loader_leaves_the_global_generator_where_it_was() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    epoch = read(loader).epoch(4, 0)
    next(epoch)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_batches() -> None:
    with pytest.raises(ValueError, match="`train_data` is empty"):
        next(read(lambda batch_size: []).epoch(4, 0))


class NoLength(Dataset[Tensor]):
    def __getitem__(self, i: int) -> Tensor:
        return X[i]


FRAME, COLUMN = pd.DataFrame(X.numpy()), pd.Series(Y.numpy())
NO_ROWS, SINGLE = (X[:0], Y[:0]), (torch.tensor(1.0), torch.tensor(1))
REFUSED: dict[str, list[Any]] = {
    "is empty, but must have at least one example": [NO_ROWS, TensorDataset(*NO_ROWS), [], (), SINGLE],
    r"has tensors of \[11, 10\] examples": [(X, Y[:-1])],
    "is a ": [None, 3, "digits.csv", b"digits", {"x": X, "y": Y}, {X, Y}, loader(4), Stream(), NoLength(), (X, None)],
    # Its columns would be examples.
    r"is a DataFrame, but must be .* `.to_numpy\(\)` makes arrays": [FRAME],
    r"is a tuple of DataFrame, Series, but must be .* `.to_numpy\(\)` makes arrays": [(FRAME, COLUMN)],
    r"is a list of Tensor, Series, but must be .* `.to_numpy\(\)` makes arrays": [[X, COLUMN]],
    r"is a .*, but must be .* `make_loader\(batch_size\)`": [TensorDataset],
    "is a function, .* This function does not take one argument": [lambda: []],
}
"""What is no data, by what is said of it."""


@pytest.mark.parametrize(("told", "wrong"), [(told, wrong) for told, every in REFUSED.items() for wrong in every])
def test_other_data_are_refused(told: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"`train_data` {told}"):
        read(wrong)


@pytest.mark.filterwarnings("ignore:.*(Sparse|nested tensors).*")
@pytest.mark.parametrize("form", [Tensor.to_sparse, Tensor.to_sparse_csr, lambda x: torch.nested.nested_tensor([*x])])
def test_tensors_without_rows_in_memory_are_refused(form: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=r"`train_data\[0\]\.layout` is .*, but must be a dense tensor's"):
        read((form(X), Y))


@pytest.mark.parametrize("view", [lambda x: x[::-1], lambda x: x.astype(">f4")])
def test_arrays_that_torch_refuses_are_copied(view: Callable[[Any], Any]) -> None:
    array = view(X.numpy())
    ((x, _),) = read((array, Y)).in_order(N)
    assert x.tolist() == array.tolist()


def test_arrays_that_cannot_be_written_are_read_without_a_warning() -> None:
    array: Any = X.numpy().copy()
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(next(read((array, Y)).in_order(N))[0], X)


def test_other_validation_data_are_told_of_splitters() -> None:
    with pytest.raises(ValueError, match=r"`val_data` is a float, but must be .*, or a splitter such as `KFold\(5\)`"):
        make_batches(0.2, "val_data", CPU, 0)  # type: ignore[arg-type]


def test_a_function_that_makes_no_loader() -> None:
    batches = read(lambda batch_size: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="`train_data` is a function that returned a int, but must be"):
        next(batches.epoch(4, 0))


def test_descriptions_tell_data_of_different_form_apart() -> None:
    described = [
        read(form).describe()
        for form in ((X, Y), (X[:-1], Y[:-1]), (X, Y.float()), TensorDataset(X, Y), loader, generated, Dicts())
    ]
    assert len(set(described)) == len(described)
    assert read((X, Y)).describe() == "tensors (11, 2) float32, (11,) int64"


class Kept:
    """Tensors that are no fields."""

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_"):
            raise AttributeError(name)
        return X


@dataclass
class Example:
    """As a data set returns it, and, put together, as a loader does."""

    x: Tensor
    y: Tensor
    name: str
    missing: Tensor | None = None


class Examples(Dataset[Example]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Example:
        return Example(X[i], Y[i], str(i))


def loads_objects(batch_size: int) -> list[Example]:
    return [Example(X[i : i + batch_size], Y[i : i + batch_size], "") for i in range(0, N, batch_size)]


@pytest.mark.parametrize("workers", [0, 2])
def test_objects_of_tensors_are_put_together_moved_and_shared(workers: int) -> None:
    loaded = make_batches(Examples(), "train_data", torch.device("cpu"), 0, loader_workers=workers)
    for batches in (loaded, read(loads_objects)):
        first = next(batches.in_order(4))
        assert isinstance(first, Example)
        assert torch.equal(first.x, X[:4])
        assert torch.equal(first.y, Y[:4])
        ((mine, *_),) = [tuple(batches.shares(N, None, Shard(1, 2)))]
        assert torch.equal(mine.batch.x, X[1::2])
        elsewhere = next(batches.on(torch.device("meta")).in_order(4))
        assert elsewhere.x.device.type == "meta"
    assert next(loaded.in_order(4)).name == ["0", "1", "2", "3"]
    assert next(loaded.in_order(1)).name == ["0"]


@pytest.mark.parametrize("absent", [0, 1])
def test_a_field_that_only_some_examples_have_is_refused(absent: int) -> None:
    """Rather than left out of their batch."""

    class Some(Examples):
        def __getitem__(self, i: int) -> Example:
            return Example(X[i], Y[i], str(i), None if i == absent else X[i])

    with pytest.raises(TypeError, match="NoneType"):
        next(make_batches(Some(), "train_data", torch.device("cpu"), 0).in_order(4))


def test_batch_length() -> None:
    assert batch_length((X, Y)) == N
    assert batch_length({"scale": torch.tensor(1.0), "x": [X]}) == N
    with pytest.raises(ValueError, match=r"without a tensor of one or more dimensions$"):
        batch_length({"scale": torch.tensor(1.0)})
    assert batch_length(UserDict(x=X)) == N, "as the tokenizers of transformers return"
    with pytest.raises(ValueError, match=r"a batch is Kept without .* in its fields; give a tuple or a dict of"):
        batch_length(Kept())
    assert batch_length((torch.as_tensor(np.zeros((3, 2))),)) == 3


def shares_of(data: Data, world: int, size: int, epoch: int | None) -> list[tuple[Share, ...]]:
    """For each step, every rank's share."""
    ranks = [read(data).shares(size, epoch, Shard(rank, world)) for rank in range(world)]
    return list(zip(*ranks, strict=True))


def quick_and_slow(quick: Sequence[int | None], slow: Sequence[int]) -> list[Any]:
    return [*quick, *(pytest.param(value, marks=pytest.mark.slow) for value in slow)]


@pytest.mark.parametrize("epoch", quick_and_slow([0, None], [1]))
@pytest.mark.parametrize("size", quick_and_slow([1, 3, 5, 12], [2, 4, 8]))
@pytest.mark.parametrize("world", quick_and_slow([2, 3, 8], [1, 4, 12]))
def test_ranks_share_the_batches_of_one_process(data: Data, world: int, size: int, epoch: int | None) -> None:
    batches = read(data)
    whole = targets(batches.in_order(size) if epoch is None else batches.epoch(size, epoch))
    steps = shares_of(data, world, size, epoch)
    assert len(steps) == len(whole)
    if epoch is not None:
        assert batches.steps(size) == len(steps)
    for batch, shares in zip(whole, steps):
        counted = [share.batch[1].tolist() for share in shares if share.examples]
        assert [len(part) for part in counted] == [share.examples for share in shares if share.examples]
        assert counted == [batch[rank :: len(counted)] for rank in range(len(counted))]
        assert sum(share.weight for share in shares) == pytest.approx(world)
        assert [share.weight for share in shares] == pytest.approx([s.examples * world / len(batch) for s in shares])
        for share in shares:
            assert torch.equal(share.batch[0], X[share.batch[1]])
            assert set(share.batch[1].tolist()) <= set(batch)
            if epoch is not None and size > 1 and len(batch) > 1:
                assert len(share.batch[1]) > 1
        if len(batch) >= 2 * world:
            assert {share.examples for share in shares} <= {len(batch) // world, -(-len(batch) // world)}


def test_alone_a_share_is_the_batch(data: Data) -> None:
    for share, batch in zip(read(data).shares(4, 1, Shard()), read(data).epoch(4, 1), strict=True):
        assert (share.examples, share.weight) == (len(batch[1]), 1.0)
        assert torch.equal(share.batch[1], batch[1])


def test_a_rank_loads_its_own_examples_alone() -> None:
    loaded: list[int] = []

    class Watched(Dicts):
        def __getitem__(self, i: int) -> dict[str, Tensor]:
            loaded.append(i)
            return super().__getitem__(i)

    for share in read(Watched()).shares(2, 0, Shard(1, 2)):
        assert share.batch["y"].tolist() == loaded
        loaded.clear()


def test_of_a_loaders_batch_what_has_no_row_for_each_example_stays_whole() -> None:
    def loader(batch_size: int) -> Iterator[dict[str, Any]]:
        yield {"x": X, "scale": torch.tensor(2.0), "classes": torch.zeros(3), "name": "kept"}

    (share,) = read(loader).shares(4, 0, Shard(1, 2))
    assert torch.equal(share.batch["x"], X[1::2])
    assert share.batch["scale"] == 2.0
    assert share.batch["classes"].shape == (3,)
    assert share.batch["name"] == "kept"


@pytest.mark.parametrize("form", ["tensors", "dataset", "loader"])
def test_batches_on_another_device(form: str) -> None:
    here = read(FORMS[form])
    there = here.on(torch.device("meta"))
    assert {t.device.type for batch in there.epoch(4, 0) for t in batch} == {"meta"}
    assert {t.device.type for batch in there.in_order(4) for t in batch} == {"meta"}
    assert {t.device.type for batch in here.epoch(4, 0) for t in batch} == {"cpu"}
    assert there.describe() == here.describe()


def read_only(buffers: list[pickle.PickleBuffer]) -> list[memoryview]:
    """The same bytes in pages that cannot be written to, as those of Ray's object store."""
    mapped = []
    for buffer in buffers:
        with tempfile.TemporaryFile() as file:
            file.write(buffer.raw())
            file.flush()
            mapped.append(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    return mapped


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.cfloat],
)
def test_a_pickle_shares_the_memory_of_tensors(dtype: torch.dtype) -> None:
    x = (X % 2).to(dtype)
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(read((x, x.T.contiguous().T, Y)), protocol=5, buffer_callback=buffers.append)
    assert [len(buffer.raw()) for buffer in buffers] == [x.nbytes, x.nbytes, Y.nbytes]
    shared = read_only(buffers)
    again: Batches = pickle.loads(stream, buffers=shared)
    assert again.describe() == read((x, x, Y)).describe()
    for epoch in range(2):
        for one, other in zip(again.epoch(4, epoch), read((x, x, Y)).epoch(4, epoch), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_what_is_written_to_a_batch_from_a_pickle_stays_there() -> None:
    """Without a copy, the write would end this process."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(read((X, Y)), protocol=5, buffer_callback=buffers.append)
    again: Batches = pickle.loads(stream, buffers=read_only(buffers)).on(CPU)
    for batches in (again.in_order(4), again.epoch(4, 0), (s.batch for s in again.shares(2, None, Shard(1, 2)))):
        for x, y in batches:
            x.zero_()
            y.fill_(-1)
    assert torch.equal(torch.cat([x for x, _ in again.in_order(4)]), X)


@pytest.mark.parametrize("form", ["tensors", "dataset", "loader"])
def test_a_plain_pickle_reads_as_before(form: str) -> None:
    again: Batches = pickle.loads(pickle.dumps(read(FORMS[form])))
    assert targets(again.epoch(4, 1)) == targets(read(FORMS[form]).epoch(4, 1))
    assert targets(again.in_order(4)) == targets(read(FORMS[form]).in_order(4))


KEPT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensors": lambda x, y: (x, y),
    "arrays": lambda x, y: [x.numpy(), y.numpy()],
    "dataset": TensorDataset,
    "loader of one batch": lambda x, y: lambda batch_size: [(x, y)],
    "loader of nested batches": lambda x, y: lambda batch_size: [{"x": [x], "y": y}],
}


@pytest.mark.parametrize("form", sorted(KEPT.keys() - {"arrays"}))
def test_features_of_another_model_are_no_part_of_its_graph(form: str) -> None:
    """They were computed without `no_grad`: the second step would go back through a graph that is gone."""
    given = torch.nn.Linear(2, 3)(X).tanh()
    batches = read(KEPT[form](given, Y))
    for _ in range(2):
        for batch in (*batches.epoch(4, 0), *batches.in_order(4)):
            features, _ = tree_leaves(batch)
            assert features.requires_grad  # as physics-informed networks need it
            features.square().sum().backward()


class Unsized:
    """A stream whose class has a length in name only."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(X, Y)] * 2)

    def __len__(self) -> int:
        raise NotImplementedError


class Counting(Unsized):
    """A loader that ends by its length, and goes through its batches to find that."""

    asked = 0

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat((X, Y))

    def __len__(self) -> int:
        self.asked += 1
        return 5


def test_a_loader_is_asked_for_its_length_once_an_epoch() -> None:
    counting = Counting()
    assert len([*read(lambda batch_size: counting).epoch(4, 0)]) == 5
    assert counting.asked == 1


def test_a_length_that_is_not_implemented_is_unknown() -> None:
    stream = read(lambda batch_size: Unsized())
    assert stream.steps(4) is None
    assert len([*stream.epoch(4, 0)]) == 2


@pytest.mark.parametrize("batch_size", [1, 4, N])
@pytest.mark.parametrize("form", KEPT)
def test_what_is_written_into_a_batch_does_not_reach_the_data(form: str, batch_size: int) -> None:
    x, y = X.clone(), Y.clone()
    batches = read(KEPT[form](x, y))
    for epoch in (batches.epoch(batch_size, 0), batches.in_order(batch_size), batches.on(CPU).in_order(batch_size)):
        for batch in epoch:
            for leaf in tree_leaves(batch):
                leaf.fill_(-1)
    assert torch.equal(x, X)
    assert torch.equal(y, Y)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Draws from every generator for each example."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(2) + random.random() + np.random.rand()
        return X[i] + noise, Y[i]


def augmented(batch_size: int) -> Iterator[Any]:
    data = Augmented()
    for rows in torch.randperm(N).split(batch_size):
        yield tuple(map(torch.stack, zip(*(data[int(i)] for i in rows))))


@pytest.mark.parametrize("data", [Augmented(), augmented, lambda n: DataLoader(Augmented(), n, shuffle=True)])
def test_what_a_model_draws_does_not_change_the_data(data: Data) -> None:
    """Nor the other way round; and each epoch draws anew."""

    def epoch(number: int | None, draws: int) -> tuple[list[Any], list[float]]:
        batches, drawn, seen = read(data), [], []
        seed_generators(0)
        for batch in batches.in_order(4) if number is None else batches.epoch(4, number):
            seen.append(batch[0].tolist())
            drawn += [torch.rand(()).item() + random.random() + np.random.rand() for _ in range(draws)]
        return seen, drawn

    assert epoch(1, 0)[0] == epoch(1, 3)[0]
    assert epoch(None, 0)[0] == epoch(None, 3)[0]
    assert epoch(1, 3)[1] == epoch(2, 3)[1]
    assert epoch(1, 0)[0] != epoch(2, 0)[0]


def test_ranks_draw_different_augmentations() -> None:
    ones = [next(read(Augmented()).shares(4, 0, Shard(rank, 2))).batch for rank in range(2)]
    noise = [(x - X[y])[0] for x, y in ones]
    assert not torch.allclose(noise[0], noise[1])
