"""The ends of rungs: the training iterations at which halving is decided."""

from __future__ import annotations

from hydro_rasda.checks import check_int


def milestones(min_t: int, max_t: int, factor: int) -> tuple[int, ...]:
    """Return the milestones of successive halving, `min_t * factor**k` for k = 0, 1, ..., the last one at `max_t`.

    Built by integer multiplication: a float logarithm of `max_t / min_t` loses a rung at, say, 243 / 3.
    The first milestone that reaches or passes `max_t` becomes `max_t`.

    In RASDA's eqs. 2 and 3, the arguments are min_I, max_I and the scaling factor. In ASHA, `factor` is the reduction
    factor.

    >>> milestones(1, 243, 3)
    (1, 3, 9, 27, 81, 243)
    >>> milestones(5, 40, 2)
    (5, 10, 20, 40)
    >>> milestones(5, 30, 2)
    (5, 10, 20, 30)
    """
    check_int("min_t", min_t, at_least=1)
    check_int("factor", factor, at_least=2)
    check_int("max_t", max_t, at_least=min_t)
    found = []
    milestone = min_t
    while milestone < max_t:
        found.append(milestone)
        milestone *= factor
    return (*found, max_t)


def first_milestone(min_t: int, max_t: int, factor: int, warmup: float) -> int:
    """Return the first of the milestones at which a warm-up is over; `max_t` if it never is.

    Before that, a trial would be judged by a learning rate that is still warming up. The later milestones are the same
    as without a warm-up.

    >>> first_milestone(1, 27, 3, warmup=0), first_milestone(1, 27, 3, warmup=2.5), first_milestone(1, 27, 3, warmup=50)
    (1, 3, 27)
    """
    return next((m for m in milestones(min_t, max_t, factor) if m >= warmup), max_t)


def sweep_milestones(min_t: int, max_t: int, factor: int) -> tuple[int, ...]:
    """Those of a sweep: the last one lies where one more would be the end of a training, unless it is the first.

    From there on full-size models tell more for their price than surrogates do.

    >>> sweep_milestones(1, 27, 3), sweep_milestones(1, 26, 3), sweep_milestones(27, 27, 3)
    ((1, 3, 9), (1, 3), (27,))
    """
    first, *later = milestones(min_t, max_t, factor)
    return (first, *(stop for stop in later if stop * factor <= max_t))


def race_milestones(min_t: int, max_t: int, factor: int) -> tuple[int, ...]:
    """Return those of a race, and the last look: midway between the last two, if it leaves two epochs or more.

    >>> race_milestones(14, 27, 2), race_milestones(2, 9, 2), race_milestones(2, 4, 2)
    ((14, 21, 27), (2, 4, 8, 9), (2, 4))
    """
    found = milestones(min_t, max_t, factor)
    look = last_look(found)
    return found if look is None else (*found[:-1], look, max_t)


def last_look(stops: tuple[int, ...]) -> int | None:
    """Return the epoch midway between the last two milestones; None if fewer than two epochs would be left.

    >>> last_look((14, 27)), last_look((2, 4)), last_look((27,))
    (21, None, None)
    """
    look = (stops[-2] + stops[-1] + 1) // 2 if len(stops) > 1 else stops[-1]
    return look if stops[-1] - look >= 2 else None
