"""Parts of a recipe's text that are the same for many trainings: reading the data, and seeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Form = Literal["tensors", "dataset", "loaders"]
"""Form of training data."""

BEFORE: Mapping[Form, list[str]] = {
    "tensors": [
        "data = [torch.as_tensor(t).to(device) for t in train_data]",
        "steps = len(rows_of(len(data[0]), 0))",
    ],
    "dataset": ["steps = len(rows_of(len(train_data), 0))"],
    "loaders": ["length = length_of(train_data(BATCH_SIZE))", "steps = length or 1"],
}
BATCHES: Mapping[Form, str] = {
    "tensors": "batches_of(data, epoch)",
    "dataset": "batches_of(train_data, epoch, device)",
    "loaders": "batches_of(train_data, epoch, device)",
}
DATA: Mapping[Form, str] = {
    "tensors": '''
def batches_of(data, epoch):
    """The batches of an epoch, in the order of the run."""
    for rows in rows_of(len(data[0]), epoch):
        yield tuple(t.detach()[rows.to(t.device)].requires_grad_(t.requires_grad) for t in data)
''',
    "dataset": '''
def batches_of(dataset, epoch, device):
    """The batches of an epoch, in the order of the run; each has random numbers of its own to load by."""
    seed = derived(SEED, "load", epoch)
    for number, rows in enumerate(rows_of(len(dataset), epoch)):
        with Apart(derived(seed, number)):
            several = getattr(dataset, "__getitems__", None)
            batch = default_collate(several(rows.tolist()) if several else [dataset[row] for row in rows.tolist()])
        yield tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch)
''',
    "loaders": '''
def batches_of(make_loader, epoch, device):
    """The batches of an epoch; the loader draws random numbers of its own, as in the run."""
    numbers = Apart(derived(SEED, "shuffle", epoch))
    with numbers:
        loader = make_loader(BATCH_SIZE)
        batches = iter(loader)
    length = length_of(loader)
    for _ in itertools.count() if length is None else range(length):
        with numbers:
            batch = next(batches, numbers)
        if batch is numbers:
            return
        yield tree_map(lambda leaf: leaf.to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf, batch)


def length_of(loader):
    """How many batches a loader has; None where only reading them tells."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
''',
}
ROWS = [
    '''
def rows_of(length, epoch):
    """Which examples each batch of an epoch has; a single one that is left over joins the batch before it."""
    generator = torch.Generator().manual_seed(derived(SEED, "shuffle", epoch))
    chunks = list(torch.randperm(length, generator=generator).split(BATCH_SIZE))
    if len(chunks) > 1 and len(chunks[-1]) == 1 and BATCH_SIZE > 1:
        chunks[-2:] = [torch.cat(chunks[-2:])]
    return chunks
'''
]
PARTS = [
    '''
def parts_of(batch, parts):
    """A batch in parts, which are learnt from one after another, and the share of its examples that each has.

    No part of a smaller batch has a single example, unless those of a whole batch have.
    """
    leaves, spec = tree_flatten(batch)
    rows = [isinstance(leaf, torch.Tensor) and leaf.ndim > 0 for leaf in leaves]
    length = next(len(leaf) for leaf, has_rows in zip(leaves, rows) if has_rows)
    parts = max(1, min(parts, length // (2 if BATCH_SIZE >= 2 * parts else 1)))
    split = [leaf.tensor_split(parts) if has_rows else [leaf] * parts for leaf, has_rows in zip(leaves, rows)]
    for part in zip(*split):
        examples = next(len(leaf) for leaf, has_rows in zip(part, rows) if has_rows)
        yield tree_unflatten(list(part), spec), examples / length
'''
]
APART = [
    '''
class Apart:
    """Random numbers of their own for what loads data: the model draws as if it drew none."""

    def __init__(self, seed):
        self.seed, self.states = seed, None

    def __enter__(self):
        self.before = self.now()
        if self.states is None:
            random.seed(self.seed)
            np.random.seed(self.seed % 2**32)
            torch.default_generator.manual_seed(self.seed)
        else:
            self.go_on(*self.states)

    def __exit__(self, *error):
        self.states = self.now()
        self.go_on(*self.before)

    def now(self):
        return random.getstate(), np.random.get_state(), torch.get_rng_state()

    def go_on(self, python, numpy, torchs):
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torchs)
'''
]
SEEDS = '''
def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def derived(*parts):
    """A seed for one purpose, the same on every machine."""
    entropy = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in parts]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))
'''
