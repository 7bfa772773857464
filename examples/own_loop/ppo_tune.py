"""PPO on CartPole (Schulman et al. 2017), tuned by its own training loop: `ppo.py` with these lines changed."""

import gymnasium
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from hydro_rasda import LocalBackend, choice, loguniform, tune, uniform

EPOCHS, STEPS, ENVS = 9, 512, 8


def model_fn(config, width_ratio=1.0):
    """Build the actor and the critic."""
    width = int(256 * width_ratio)

    def mlp(outputs):
        return nn.Sequential(
            nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)
        )

    return nn.ModuleDict({"actor": mlp(2), "critic": mlp(1)})


def make_envs(count):
    """Make environments that step together."""
    return gymnasium.make_vec("CartPole-v1", count, vectorization_mode="vector_entry_point")


@torch.no_grad()
def collect(model, config, seed):
    """Play with sampled actions; return states, actions, their log-probabilities, advantages and returns."""
    envs, ended, steps = make_envs(ENVS), np.zeros(ENVS, bool), []
    state = torch.from_numpy(envs.reset(seed=seed)[0])
    for _ in range(STEPS):
        policy = Categorical(logits=model["actor"](state))
        action = policy.sample()
        value = model["critic"](state).squeeze(1)
        counts = torch.from_numpy(~ended)  # a step after an episode's end ignores the action, and only resets
        following, reward, terminated, truncated, _ = envs.step(action.numpy())
        ended = terminated | truncated
        facts = (torch.from_numpy(of).float() for of in (reward, terminated, ended))
        steps.append((state, action, policy.log_prob(action), value, counts, *facts))
        state = torch.from_numpy(following)
    states, actions, log_probs, values, counts, rewards, fell, over = map(torch.stack, zip(*steps))
    advantages, advantage = torch.zeros_like(values), torch.zeros(ENVS)
    after = model["critic"](state).squeeze(1)
    for t in reversed(range(STEPS)):
        delta = rewards[t] + 0.99 * after * (1 - fell[t]) - values[t]
        advantages[t] = advantage = delta + 0.99 * config["gae_lambda"] * advantage * (1 - over[t])
        after = values[t]
    return [of[counts] for of in (states, actions, log_probs, advantages, advantages + values)]


def loss_of(model, batch, config):
    """Return PPO's clipped loss, with the loss of the critic and the entropy."""
    states, actions, log_probs, advantages, returns = batch
    policy, values = Categorical(logits=model["actor"](states)), model["critic"](states).squeeze(1)
    ratio = (policy.log_prob(actions) - log_probs).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - config["clip"], 1 + config["clip"]) * advantages)
    return (values - returns).square().mean() * 0.5 - gain.mean() - config["entropy"] * policy.entropy().mean()


@torch.no_grad()
def mean_return(model, episodes=32):
    """Return the mean return of episodes with the most probable actions."""
    envs, going, total = make_envs(episodes), np.ones(episodes, bool), 0
    state, _ = envs.reset(seed=0)
    while going.any():
        state, _, terminated, truncated, _ = envs.step(model["actor"](torch.from_numpy(state)).argmax(1).numpy())
        total += going.sum()
        going &= ~(terminated | truncated)
    return total / episodes


def train(worker):
    """Train an agent."""
    model, config = worker.model(), worker.config
    optimizer = worker.optimizer(model, torch.optim.Adam, lr=config["lr"])
    parts = {"model": model, "optimizer": optimizer}
    for name, state in (worker.checkpoint or {}).items():
        parts[name].load_state_dict(state)
    for epoch in range(worker.iteration, EPOCHS):
        seen = collect(model, config, seed=1 + epoch)
        seen[3] = (seen[3] - seen[3].mean()) / seen[3].std()
        for _ in range(config["passes"]):
            for rows in torch.randperm(len(seen[0])).split(512):
                optimizer.zero_grad()
                loss_of(model, [of[rows] for of in seen], config).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        worker.report({"return": mean_return(model)}, {name: part.state_dict() for name, part in parts.items()})


space = {
    "lr": loguniform(1e-4, 1e-1),
    "gae_lambda": uniform(0.8, 1),
    "clip": uniform(0.1, 0.4),
    "entropy": loguniform(1e-4, 1e-1),
    "passes": choice([4, 8]),
}
result = tune(
    model_fn,
    space,
    train=train,
    metric="return",
    mode="max",
    num_samples=16,
    max_t=EPOCHS,
    stop_at=475,  # CartPole counts as solved
    backend=LocalBackend(device="cpu"),  # the models are too small for a GPU
)
print(f"Best configuration {result.best_config}: mean return {result.best_metric:.1f}")
