"""The outcomes of recorded searches, as a slower simulator gave them that rebuilt everything at each decision.

"failing, noisy" alone has storage that trials wait for: these are recorded since they share it alike.
"""

from tests.hydro_rasda.simulator.recorded import digests

EXPECTED = {
    "ASHA, small, alike": "27879e3ea3ab",
    "ASHA, small, noisy": "f620f6a7dd81",
    "ASHA, large, alike": "283eaf5b66cf",
    "ASHA, large, noisy": "fcc090f31985",
    "ASHA, troubled, alike": "790d9bf9af0f",
    "ASHA, troubled, noisy": "4043ce441f52",
    "ASHA, failing, alike": "ffc194f9db06",
    "ASHA, failing, noisy": "872f1e7e59ac",
    "RASDA, small, alike": "178051700165",
    "RASDA, small, noisy": "5eeff5f4e599",
    "RASDA, large, alike": "a3ee9d022453",
    "RASDA, large, noisy": "84f3ab2493f5",
    "RASDA, troubled, alike": "70fc919e5d89",
    "RASDA, troubled, noisy": "2cf59ba228aa",
    "RASDA, failing, alike": "4b093ba0b584",
    "RASDA, failing, noisy": "8bb189ded09e",
    "capped, small, alike": "c3ae43925105",
    "capped, small, noisy": "a4f889ab6df2",
    "capped, large, alike": "95788816ba48",
    "capped, large, noisy": "d03a813907b7",
    "capped, troubled, alike": "37592a63508a",
    "capped, troubled, noisy": "ed4157233f9d",
    "capped, failing, alike": "82d17c944f17",
    "capped, failing, noisy": "204d9fd3eda7",
    "varying, small, alike": "8eb3c579629f",
    "varying, small, noisy": "5b48da80537b",
    "varying, large, alike": "e080297930d7",
    "varying, large, noisy": "796682a77f92",
    "varying, troubled, alike": "02c487f143f2",
    "varying, troubled, noisy": "71b423aaff21",
    "varying, failing, alike": "f6da2c2e87d2",
    "varying, failing, noisy": "ba556ad250d9",
    "paying, small, alike": "c1a6ee86101e",
    "paying, small, noisy": "230c3d0c3fb5",
    "paying, large, alike": "4afb7052daa7",
    "paying, large, noisy": "d475525f611b",
    "paying, troubled, alike": "7c2bf6f12ec3",
    "paying, troubled, noisy": "828bc98d5786",
    "paying, failing, alike": "8135535b4870",
    "paying, failing, noisy": "dab9432ef61e",
    "filling, small, alike": "371bf5066aeb",
    "filling, small, noisy": "0572dcb08f0d",
    "filling, large, alike": "298236873dee",
    "filling, large, noisy": "c6cec00da82f",
    "filling, troubled, alike": "af18ff193b24",
    "filling, troubled, noisy": "5ffb7a0983ba",
    "filling, failing, alike": "c751e5af9d7d",
    "filling, failing, noisy": "ce80fde9346f",
}


def test_outcomes_are_as_recorded() -> None:
    assert digests() == EXPECTED
