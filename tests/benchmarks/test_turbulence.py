"""The solver against closed forms and conservation laws."""

import math

import pytest
import torch

from benchmarks.turbulence import Solver, enstrophy, random_vorticity, snapshots


def grid(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, 1] and y [1, n]."""
    points = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
    return points[:, None], points[None, :]


@pytest.mark.parametrize("k", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_taylor_green_vortices_decay_exactly(k: int) -> None:
    """Taylor & Green (1937): u . grad omega is zero, so omega decays by exp(-2 nu k^2 t)."""
    x, y = grid(32)
    start = 2 * k * torch.cos(k * x) * torch.cos(k * y)
    solver = Solver(32, viscosity=0.05, dt=0.02)
    end = solver.run(start, 100)
    torch.testing.assert_close(end, start * math.exp(-2 * 0.05 * k**2 * 2.0), rtol=0, atol=1e-12)
    # |u|^2 = sin^2 cos^2 + cos^2 sin^2 has the mean 1/2; omega^2 that of 4 k^2 cos^2 cos^2, k^2.
    assert solver.energy(start).item() == pytest.approx(1 / 4)
    assert enstrophy(start).item() == pytest.approx(k**2 / 2)


def test_crossed_shear_flows_stand_still() -> None:
    """omega = cos(x) + a cos(y): u . grad omega = a (sin(x) sin(y) - sin(x) sin(y)) = 0."""
    x, y = grid(32)
    start = torch.cos(x) + 0.5 * torch.cos(y)
    torch.testing.assert_close(Solver(32, 0.0, 0.05).run(start, 40), start, rtol=0, atol=1e-12)


def test_without_viscosity_energy_and_enstrophy_stay() -> None:
    """Dealiased products conserve both; the time step's error is left, which halving it divides by 16 or more."""
    start = Solver(64, 0.0, 0.0).run(random_vorticity(2, 64, seed=0), 0)
    drifts = []
    for dt in (0.01, 0.005):
        solver = Solver(64, 0.0, dt)
        end = solver.run(start, round(0.4 / dt))
        assert not torch.allclose(end, start, atol=0.1)
        quantities = torch.stack([solver.energy(end) / solver.energy(start), enstrophy(end) / enstrophy(start)])
        drifts.append((quantities - 1).abs().amax(1))
    assert (drifts[0] < 1e-5).all()
    assert (drifts[0] / drifts[1] > 14).all()


def test_energy_decays_at_twice_viscosity_times_enstrophy() -> None:
    nu, dt = 1e-2, 1e-3
    solver = Solver(64, nu, dt)
    before = random_vorticity(3, 64, seed=1)
    now, after = solver.run(before, 1), solver.run(before, 2)
    rate = (solver.energy(after) - solver.energy(before)) / (2 * dt)
    torch.testing.assert_close(rate, -2 * nu * enstrophy(now), rtol=1e-4, atol=0)


def test_snapshots_repeat_and_flows_differ() -> None:
    first, again = snapshots(2, 3, n=32, seed=0), snapshots(2, 3, n=32, seed=0)
    assert first.shape == (2, 3, 32, 32)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert first.square().mean().item() == pytest.approx(1, abs=1e-5)
    assert (first[0] - first[1]).abs().mean() > 0.5
    # Decaying: each frame has less enstrophy than the one before.
    assert (enstrophy(first).diff(dim=1) < 0).all()
