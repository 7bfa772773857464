"""Checks for plug-ins: what an implementation of `Backend` promises.

With pytest, which is not needed otherwise:

    @pytest.mark.parametrize("check", backend_checks())
    def test_my_backend(check, tmp_path):
        check(MyBackend, tmp_path)
"""

from hydro_rasda.testing.backends import Check, backend_checks

__all__ = ["Check", "backend_checks"]
