"""PPO on CartPole by `tune(train=...)` and by random search: the time until an agent's mean return is 475.

    python -m benchmarks.own_loop_ppo [--sizes small wide] [--seeds 0 1 2]

The space is that of `sample_ppo_params` in RL Baselines3 Zoo, in the version whose learning rates go from 1e-5 to 1.
It has no `n_steps` and `net_arch`: a rollout has 128 steps of 8 environments. Nothing in it was chosen for `tune`. An
epoch is 2,048 steps of the environment, and a full training has 27 epochs. After each epoch, 32 episodes with the most
probable actions are played. An agent is done once their mean return is 475.

Random search trains the configurations of the same seed one after another at full width, each to its end or to 475.
`tune` has the same configurations, 8 at first. If it ends without such an agent, it is called again with twice as
many. It sweeps at 1/8 of the width, and once more with `surrogate=1`, which shows what halving alone saves. Random
search is stopped once it takes `MOST` times as long as the slower of these. One process computes at a time, on one
thread, so that CPU seconds are compared. The sizes, and the 8 configurations, were chosen on other seeds. What is
there is not run again. It rewrites `own_loop_ppo.{json,md}`.
"""

from __future__ import annotations

import itertools
import math
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.result_files import Row, columns, environment, options, read, save
from hydro_rasda import LocalBackend, SweepConfig, choice, loguniform, tune, uniform
from hydro_rasda.space.space import sample

FILE = "own_loop_ppo.json"
ENVS, ROLLOUT, ROLLOUTS, EPOCHS, DONE = 8, 128, 2, 27, 475.0
STEPS = ENVS * ROLLOUT * ROLLOUTS
"""Steps of the environment in an epoch."""
TRIALS, MOST_TRIALS, MOST = 8, 128, 4.0
SPACE = {
    "batch_size": choice([8, 16, 32, 64, 128, 256, 512]),
    "gamma": choice([0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999]),
    "lr": loguniform(1e-5, 1.0),
    "ent_coef": loguniform(1e-8, 0.1),
    "clip_range": choice([0.1, 0.2, 0.3, 0.4]),
    "n_epochs": choice([1, 5, 10, 20]),
    "gae_lambda": choice([0.8, 0.9, 0.92, 0.95, 0.98, 0.99, 1.0]),
    "max_grad_norm": choice([0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 2.0, 5.0]),
    "vf_coef": uniform(0, 1),
    "activation": choice(["tanh", "relu"]),
}
Config = Mapping[str, Any]


class Size(NamedTuple):
    """The width and number of hidden layers of actor and critic, and the number of seeds."""

    width: int
    layers: int
    seeds: int


SIZES = {"small": Size(256, 2, 5), "wide": Size(512, 3, 3)}


def agent(config: Config, width_ratio: float = 1.0, size: Size = SIZES["small"]) -> nn.Module:
    """Build the actor and the critic."""
    width = int(size.width * width_ratio)
    activation = {"tanh": nn.Tanh, "relu": nn.ReLU}[config["activation"]]

    def mlp(outputs: int) -> nn.Module:
        layers = list[nn.Module]()
        for inputs in [4, *[width] * (size.layers - 1)]:
            layers += [nn.Linear(inputs, width), activation()]
        return nn.Sequential(*layers, nn.Linear(width, outputs))

    return nn.ModuleDict({"actor": mlp(2), "critic": mlp(1)})


def make_envs(count: int) -> Any:
    """Make environments that step together."""
    import gymnasium  # imported here, because the page of results does not need it

    return gymnasium.make_vec("CartPole-v1", count, vectorization_mode="vector_entry_point")


class Game:
    """Episodes of `ENVS` environments, which go on from one rollout to the next."""

    def __init__(self, seed: int) -> None:
        self._envs = make_envs(ENVS)
        self._state = torch.from_numpy(self._envs.reset(seed=seed)[0])
        self._ended = np.zeros(ENVS, bool)

    @torch.no_grad()
    def rollout(self, model: Any, config: Config) -> list[Tensor]:
        """Play with sampled actions; return states, actions, their log-probabilities, advantages and returns."""
        steps = []
        for _ in range(ROLLOUT):
            logs = model["actor"](self._state).log_softmax(1)
            actions = logs.exp().multinomial(1).squeeze(1)
            counts = torch.from_numpy(~self._ended)  # a step after an episode's end ignores the action, and only resets
            following, _, fell, cut, _ = self._envs.step(actions.numpy())
            self._ended = fell | cut
            facts = (torch.from_numpy(of).float() for of in (fell, self._ended))
            steps.append((self._state, actions, logs.gather(1, actions[:, None]).squeeze(1), counts, *facts))
            self._state = torch.from_numpy(following)
        states, taken, log_probs, counts, fallen, over = map(torch.stack, zip(*steps))
        values = model["critic"](torch.cat([states, self._state[None]])).squeeze(2)
        advantages, advantage = torch.zeros(ROLLOUT, ENVS), torch.zeros(ENVS)
        for t in reversed(range(ROLLOUT)):
            surprise = 1 + config["gamma"] * values[t + 1] * (1 - fallen[t]) - values[t]
            advantage = surprise + config["gamma"] * config["gae_lambda"] * advantage * (1 - over[t])
            advantages[t] = advantage
        return [of[counts] for of in (states, taken, log_probs, advantages, advantages + values[:-1])]


def loss_of(model: Any, batch: list[Tensor], config: Config) -> Tensor:
    """Return PPO's clipped loss (Schulman et al. 2017), with the loss of the critic and the entropy."""
    states, actions, log_probs, advantages, returns = batch
    logs, values = model["actor"](states).log_softmax(1), model["critic"](states).squeeze(1)
    if len(states) > 1:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio, clip = (logs.gather(1, actions[:, None]).squeeze(1) - log_probs).exp(), config["clip_range"]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).mean()
    entropy = -(logs.exp() * logs).sum(1).mean()
    loss: Tensor = config["vf_coef"] * F.mse_loss(values, returns) - gain - config["ent_coef"] * entropy
    return loss


@torch.no_grad()
def mean_return(model: Any, episodes: int = 32) -> float:
    """Return the mean return of episodes with the most probable actions."""
    envs, going, total = make_envs(episodes), np.ones(episodes, bool), 0
    state, _ = envs.reset(seed=0)
    while going.any():
        state, _, fell, cut, _ = envs.step(model["actor"](torch.from_numpy(state)).argmax(1).numpy())
        total += int(going.sum())
        going &= ~(fell | cut)
    return total / episodes


def returns(model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, epochs: range) -> Iterator[float]:
    """Train for epochs and yield the mean return after each; yield NaN and end if weights are no longer finite."""
    game = Game(seed=1 + epochs.start)
    for _ in epochs:
        for _ in range(ROLLOUTS):
            seen = game.rollout(model, config)
            for _ in range(config["n_epochs"]):
                for rows in torch.randperm(len(seen[0])).split(config["batch_size"]):
                    optimizer.zero_grad()
                    loss_of(model, [of[rows] for of in seen], config).backward()
                    nn.utils.clip_grad_norm_(model.parameters(), config["max_grad_norm"])
                    optimizer.step()
            if not all(weights.isfinite().all() for weights in model.parameters()):
                yield math.nan
                return
        yield mean_return(model)


class Found(NamedTuple):
    """The best mean return that a search found, and the width ratio, return and CPU seconds of each epoch."""

    best: float
    epochs: list[tuple[float, float, float]]
    configurations: int


def by_tune(seed: int, size: Size, limit: float, surrogate: float = 1 / 8) -> Found:
    """Search by `tune(train=...)`, with more configurations until an agent is done."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "epochs"

        def train(worker: Any) -> None:
            config, model = worker.config, worker.model()
            optimizer = worker.optimizer(model, torch.optim.Adam, lr=config["lr"])
            parts = {"model": model, "optimizer": optimizer}
            for name, state in (worker.checkpoint or {}).items():
                parts[name].load_state_dict(state)
            began = time.process_time()
            for score in returns(model, optimizer, config, range(worker.iteration, worker.max_t)):
                with told.open("a") as file:  # a file, because trials train in other processes
                    file.write(f"{worker.width_ratio} {score} {time.process_time() - began}\n")
                worker.report({"return": score}, {name: part.state_dict() for name, part in parts.items()})
                began = time.process_time()

        best, count = -math.inf, TRIALS // 2
        while best < DONE and count < MOST_TRIALS:
            count *= 2
            result = tune(
                partial(agent, size=size),
                SPACE,
                train=train,
                metric="return",
                mode="max",
                num_samples=count,
                max_t=EPOCHS,
                stop_at=DONE,
                seed=seed,
                sweep=SweepConfig(surrogate=surrogate),
                storage_path=folder,
                name="run",
                backend=LocalBackend("cpu"),
                progress=False,
            )
            best = result.best_metric
        lines = [line.split() for line in told.read_text().splitlines()]
        return Found(best, [(float(w), float(r), float(s)) for w, r, s in lines], count)


def by_random_search(seed: int, size: Size, limit: float) -> Found:
    """Train one configuration after another at full width, each to its end or until it is done."""
    began, epochs, tried = time.process_time(), list[tuple[float, float, float]](), 0
    for number, config in enumerate(sample(SPACE, MOST_TRIALS, seed)):
        torch.manual_seed(1000 * seed + number)
        model, tried = agent(config, size=size), number + 1
        optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
        before = time.process_time()
        for score in returns(model, optimizer, config, range(EPOCHS)):
            epochs.append((1.0, score, time.process_time() - before))
            before = time.process_time()
            if score >= DONE or time.process_time() - began > limit:
                return Found(score, epochs, tried)
    return Found(max(score for _, score, _ in epochs), epochs, tried)


NARROW, WIDE, RANDOM = "`tune`", "`tune`, `surrogate=1`", "random search"
SEARCHES: dict[str, Callable[[int, Size, float], Found]] = {
    NARROW: by_tune,
    WIDE: partial(by_tune, surrogate=1),
    RANDOM: by_random_search,
}


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(of.ru_utime + of.ru_stime for of in used)


def measure(search: str, size: str, seed: int, limit: float) -> Row:
    """Run a search until an agent is done. Random search runs for at most `limit` CPU seconds."""
    began, cpu = time.perf_counter(), _cpu()
    found = SEARCHES[search](seed, SIZES[size], limit)
    seconds, cpu = time.perf_counter() - began, _cpu() - cpu
    row: Row = {"search": search, "size": size, "seed": seed, "seconds": seconds, "cpu": cpu, "best": found.best}
    row |= {"configurations": found.configurations, "steps": STEPS * len(found.epochs)}
    row["first epochs"] = [seconds for _, _, seconds in found.epochs[:TRIALS]]
    for name, is_full in (("narrow", False), ("full", True)):
        spent = [seconds for width, _, seconds in found.epochs if (width == 1) == is_full]
        row |= {f"{name} epochs": len(spent), f"{name} seconds": sum(spent)}
    print(row, flush=True)
    return row


class Compared(NamedTuple):
    """A search of a size over its seeds.

    Attributes:
        rows: Its rows, by seed.
        faster: For each seed, CPU seconds of random search over those of this search; a lower bound if random search
            was stopped.
        sooner: Number of seeds with which it was done sooner than random search; None for random search.
    """

    size: str
    search: str
    rows: list[Row]
    faster: list[float]
    sooner: int | None

    @property
    def stopped(self) -> str:
        """Return ">" as a mark for means if some of the searches were stopped."""
        return ">" * any(row["best"] < DONE for row in self.rows)

    def mean(self, name: str) -> float:
        return float(mean(row[name] for row in self.rows))


def compared(rows: Sequence[Row]) -> list[Compared]:
    """Compare the searches of each size, with the seeds that all of them have."""
    found = []
    for size in SIZES:
        of_size = {(row["search"], row["seed"]): row for row in rows if row["size"] == size}
        seeds = [seed for search, seed in of_size if search == RANDOM and all((s, seed) in of_size for s in SEARCHES)]
        for search in SEARCHES if seeds else ():
            own, other = ([of_size[name, seed] for seed in seeds] for name in (search, RANDOM))
            faster = [b["cpu"] / a["cpu"] for a, b in zip(own, other)]
            sooner = sum(a["best"] >= DONE and ratio > 1 for a, ratio in zip(own, faster))
            found.append(Compared(size, search, own, faster, None if search == RANDOM else sooner))
    return found


def saved_by_width(rows: Sequence[Row], size: str) -> float:
    """Return the CPU seconds of an epoch at full width over those at 1/8.

    Both sweeps of a seed begin with an epoch of the same configurations, which are compared.
    """
    firsts = {
        (row["search"], row["seed"]): row["first epochs"]
        for row in rows
        if row["size"] == size and len(row["first epochs"]) == TRIALS
    }
    seeds = {seed for search, seed in firsts if search == NARROW} & {seed for search, seed in firsts if search == WIDE}
    narrow, full = (sum(sum(firsts[search, seed]) for seed in seeds) for search in (NARROW, WIDE))
    return full / narrow if narrow else math.nan


def named(size: str) -> str:
    """Describe the agent of a size."""
    width, layers, _ = SIZES[size]
    return f"{layers} hidden layers {width} wide"


SUMMARY = (
    "actor and critic",
    "search",
    "mean CPU seconds",
    "median",
    "mean environment steps",
    "sooner than random search",
)


def summary(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return a line of text for each search of each size."""
    return [
        (
            named(of.size),
            of.search,
            f"{of.stopped}{of.mean('cpu'):.1f}",
            f"{median(row['cpu'] for row in of.rows):.1f}",
            f"{of.stopped}{of.mean('steps'):,.0f}",
            "" if of.sooner is None else f"{of.sooner} of {len(of.rows)}",
        )
        for of in compared(rows)
    ]


def lines_of(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return a line of text for each search of each seed."""
    order = sorted(rows, key=lambda row: ([*SIZES].index(row["size"]), row["seed"], [*SEARCHES].index(row["search"])))
    return [
        (
            named(row["size"]),
            str(row["seed"]),
            row["search"],
            f"{'>' * (row['best'] < DONE)}{row['seconds']:.1f}",
            f"{row['cpu']:.1f}",
            f"{'>' * (row['best'] < DONE)}{row['steps']:,}",
            str(row["configurations"]),
        )
        for row in order
    ]


def told(rows: Sequence[Row]) -> str:
    """Say in words what was found."""
    measured = compared(rows)
    random = {of.size: of for of in measured if of.sooner is None}
    found = [of for of in measured if of.sooner is not None and of.search == NARROW]
    behind = ", ".join(f"{len(of.rows) - (of.sooner or 0)} of {len(of.rows)} seeds ({named(of.size)})" for of in found)
    shares = [of.mean("cpu") / random[of.size].mean("cpu") for of in found]
    spent = " and ".join(f"{'at most ' * bool(random[of.size].stopped)}{s:.0%}" for of, s in zip(found, shares))
    saved = " and ".join(f"1/{saved_by_width(rows, of.size):.1f}" for of in found)
    return (
        f"Random search is sooner with {behind}. On average over the seeds, `tune` takes {spent} of its time. "
        f"A narrow epoch takes {saved} of the time of one at full width."
    )


SEEDS = ("actor and critic", "seed", "search", "seconds", "CPU seconds", "environment steps", "configurations")


def markdown(result: Row) -> str:
    """Return a page with a line for each search of each size, and for each search of each seed."""
    where, rows = result["environment"], result["rows"]
    return f"""# PPO on CartPole

{where["cpu"]}, one core, torch {where["torch"]}, gymnasium {where["gymnasium"]}, {where["date"]}. Rerun: `python -m \
benchmarks.own_loop_ppo`. The time until an agent's mean return over 32 episodes is {DONE:.0f}. The space is that of \
RL Baselines3 Zoo for PPO. A full training has {EPOCHS} epochs of {STEPS:,} environment steps. Random search trains \
one configuration after another at full width. It was stopped once it took at least {MOST:.0f} times as long as the \
slower of the others: then its numbers have a ">".

{columns(SUMMARY, summary(rows))}

{told(rows)}

{columns(SEEDS, lines_of(rows))}
"""


def main() -> None:
    """Run the rows that are missing, and write all."""
    parser = options(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--seeds", nargs="+", type=int, default=None, help="by default 5 of small and 3 of wide models")
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = given.out / FILE
    result = read(path, {"rows": []})
    for size in given.sizes:
        for seed, search in itertools.product(given.seeds or range(SIZES[size].seeds), SEARCHES):
            known = {row["search"]: row for row in result["rows"] if (row["size"], row["seed"]) == (size, seed)}
            if search in known:
                continue
            limit = MOST * max((row["cpu"] for row in known.values()), default=math.inf)
            result["environment"] = environment("torch", "gymnasium")
            result["rows"].append(measure(search, size, seed, limit))
            save(path, result, markdown(result))
    save(path, result, markdown(result))


if __name__ == "__main__":
    main()
