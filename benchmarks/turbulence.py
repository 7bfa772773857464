"""Two-dimensional turbulence: a pseudo-spectral solver of the Navier-Stokes equations, and snapshots to learn from.

In vorticity form, on the periodic square [0, 2 pi)^2, with the stream function psi and the viscosity nu:

    d omega / dt + u . grad omega = nu laplacian(omega),   u = (d psi / dy, -d psi / dx),   omega = -laplacian(psi)

Derivatives are taken in Fourier space, and products on the grid. Products are dealiased by the 2/3 rule (Orszag 1971),
so the nonlinear term conserves energy and enstrophy, except for the error in time. Time steps are fourth-order
Runge-Kutta. An integrating factor treats the viscous term exactly. Turbulence decays freely from a random field
(McWilliams 1984, doi:10.1017/S0022112084001750), in which vortices form and merge.

Shapes: a field is [..., n, n], indexed [x, y]; leading axes are independent flows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PEAK_WAVENUMBER = 6.0


@dataclass(frozen=True)
class Solver:
    """Steps vorticity fields in time.

    Attributes:
        n: Grid points along each side; even.
        viscosity: nu.
        dt: Time step; a flow of speed 1 crosses a grid cell in 2 pi / n.
    """

    n: int
    viscosity: float
    dt: float

    def wavenumbers(self) -> tuple[Tensor, Tensor]:
        """Return kx [n, 1] and ky [1, n/2 + 1] of the real transform."""
        kx = torch.fft.fftfreq(self.n, 1 / self.n, dtype=torch.float64)
        ky = torch.fft.rfftfreq(self.n, 1 / self.n, dtype=torch.float64)
        return kx[:, None], ky[None, :]

    def run(self, vorticity: Tensor, steps: int) -> Tensor:
        """Return the field `steps` time steps later, in double precision."""
        kx, ky = self.wavenumbers()
        square = kx**2 + ky**2
        inverse = torch.where(square > 0, 1 / square.clamp(min=1.0), 0.0)
        kept = (kx.abs() < self.n / 3) & (ky < self.n / 3)
        half = torch.exp(-self.viscosity * square * self.dt / 2)

        def slope(w: Tensor) -> Tensor:
            """Return -u . grad omega in Fourier space."""
            psi = w * inverse
            terms = torch.stack([1j * ky * psi, 1j * kx * w, -1j * kx * psi, 1j * ky * w])
            u, w_x, v, w_y = torch.fft.irfft2(terms, s=(self.n, self.n))
            advected: Tensor = torch.fft.rfft2(u * w_x + v * w_y)
            return -advected * kept

        w = torch.fft.rfft2(vorticity.double()) * kept
        for _ in range(steps):
            a = slope(w)
            b = slope(half * (w + self.dt / 2 * a))
            c = slope(half * w + self.dt / 2 * b)
            d = slope(half**2 * w + self.dt * half * c)
            w = half**2 * w + self.dt / 6 * (half**2 * a + 2 * half * (b + c) + d)
        field: Tensor = torch.fft.irfft2(w, s=(self.n, self.n))
        return field

    def energy(self, vorticity: Tensor) -> Tensor:
        """Return the mean kinetic energy <|u|^2> / 2 of each flow."""
        kx, ky = self.wavenumbers()
        square = kx**2 + ky**2
        w = torch.fft.rfft2(vorticity.double(), norm="forward")
        # The real transform has only one number of each conjugate pair, which therefore counts twice. Numbers of the
        # lowest and the highest ky count once, because both numbers of such a pair are there.
        twice = torch.where((ky == 0) | (ky == self.n / 2), 1.0, 2.0)
        total: Tensor = (twice * w.abs() ** 2 / square.clamp(min=1.0)).sum((-2, -1))
        return total / 2


def enstrophy(vorticity: Tensor) -> Tensor:
    """Return the mean <omega^2> / 2 of each flow. Energy decays at the rate 2 nu times this."""
    return vorticity.double().square().mean((-2, -1)) / 2


def random_vorticity(flows: int, n: int, seed: int) -> Tensor:
    """Draw random fields [flows, n, n] of unit root-mean-square velocity.

    The energy spectrum is E(k) ~ k / (1 + (k / k0)^4), as in McWilliams' paper but with its peak at k0. Phases are
    random.
    """
    noise = torch.randn(flows, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    solver = Solver(n, 0.0, 0.0)
    kx, ky = solver.wavenumbers()
    k = (kx**2 + ky**2).sqrt()
    # The energy E(k) is spread over a circle of length 2 pi k, and |omega| = k |u|. So |omega|^2 ~ k E(k).
    amplitude = torch.where((k > 0) & (k < n / 3), k / (1 + (k / PEAK_WAVENUMBER) ** 4).sqrt(), 0.0)
    field = torch.fft.irfft2(torch.fft.rfft2(noise) * amplitude, s=(n, n))
    unit: Tensor = field / (2 * solver.energy(field)).sqrt()[:, None, None]
    return unit


def snapshots(flows: int, frames: int, n: int = 64, seed: int = 0) -> Tensor:
    """Return the vorticity [flows, frames, n, n] of freely decaying flows, in float32, divided by its root mean square.

    The first frame is taken after a time of 2, when vortices have formed. The others lie 0.5 apart (an eddy turns over
    in about 2 pi / k0 = 1). The Reynolds number of a unit velocity and length is 1,000. A step is a quarter of the time
    in which a flow of speed 1 crosses a grid cell. The fastest velocities are about 3.
    """
    solver = Solver(n, viscosity=1e-3, dt=math.pi / (2 * n))
    every = round(0.5 / solver.dt)
    field = solver.run(random_vorticity(flows, n, seed), 4 * every)
    taken = [field]
    for _ in range(frames - 1):
        taken.append(solver.run(taken[-1], every))
    stacked = torch.stack(taken, 1)
    return (stacked / stacked.square().mean().sqrt()).float()
