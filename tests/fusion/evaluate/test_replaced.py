"""Attributes of modules and classes are replaced while any thread is inside, and restored when the last one leaves."""

from threading import Thread
from types import ModuleType
from typing import Any

from fusion.evaluate.replaced import Replaced


class Base:
    @classmethod
    def name(cls) -> str:
        return cls.__name__


class Derived(Base):
    pass


def test_the_last_block_to_end_restores_the_originals() -> None:
    module = ModuleType("module")
    module.f = original = lambda: "original"  # type: ignore[attr-defined]
    replaced = Replaced({module: {"f": lambda: "new"}})
    seen: list[Any] = []

    def other_thread() -> None:
        with replaced:
            seen.append(module.f())
        seen.append(module.f())

    with replaced:
        for _ in range(2):
            (thread := Thread(target=other_thread)).start()
            thread.join()
    assert seen == ["new"] * 4
    assert module.f is original


def test_the_originals_are_those_of_the_moment_and_names_that_the_owner_lacks_stay_away() -> None:
    """Another library may have replaced torch's functions after ours was imported."""
    module = ModuleType("module")
    module.f = 1  # type: ignore[attr-defined]
    replaced = Replaced({module: {"f": 3, "g": 3}})
    module.f = 2  # type: ignore[attr-defined]
    with replaced:
        assert (module.f, hasattr(module, "g"), replaced.originals) == (3, False, {module: {"f": 2}})
    assert module.f == 2
    assert not hasattr(module, "g")


def test_a_classmethod_comes_back_unbound() -> None:
    with Replaced({Base: {"name": classmethod(lambda cls: "new")}}):
        assert Derived.name() == "new"
    assert (Base.name(), Derived.name()) == ("Base", "Derived")
