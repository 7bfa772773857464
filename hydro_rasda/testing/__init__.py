"""Checks for plug-ins. They test whether an implementation of `Backend` keeps the promises of its contract.

Run them with pytest, for example; the checks themselves do not need it:

    @pytest.mark.parametrize("check", backend_checks())
    def test_my_backend(check, tmp_path):
        check(MyBackend, tmp_path)
"""

from hydro_rasda.testing.backends import Check, backend_checks

__all__ = ["Check", "backend_checks"]
