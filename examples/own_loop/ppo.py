"""PPO on CartPole (Schulman et al. 2017): a training loop without tuning."""

import gymnasium
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

EPOCHS, STEPS, ENVS = 9, 512, 8


def model_fn(config):
    """Build the actor and the critic."""
    width = 256

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


def train(config):
    """Train an agent."""
    model = model_fn(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    for epoch in range(EPOCHS):
        seen = collect(model, config, seed=1 + epoch)
        seen[3] = (seen[3] - seen[3].mean()) / seen[3].std()
        for _ in range(config["passes"]):
            for rows in torch.randperm(len(seen[0])).split(512):
                optimizer.zero_grad()
                loss_of(model, [of[rows] for of in seen], config).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        print(f"epoch {epoch + 1}: mean return {mean_return(model):.1f}")


torch.manual_seed(0)
train({"lr": 1e-3, "gae_lambda": 0.95, "clip": 0.2, "entropy": 0.01, "passes": 8})
