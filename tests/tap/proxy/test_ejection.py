"""Ejection of a failing upstream, and its readmission by a trial request."""

from tap.proxy.ejection import Ejection


def test_consecutive_failures_eject() -> None:
    ejection = Ejection()
    assert not any(ejection.fail(0.0) for _ in range(4))
    assert ejection.troubled
    assert not ejection.succeed(), "it was not out"
    assert [ejection.fail(1.0) for _ in range(5)] == [False, False, False, False, True]
    assert (ejection.admits(1.9), ejection.admits(2.0), ejection.count) == (False, True, 1)


def test_trial_request_ends_the_ejection_or_doubles_the_wait() -> None:
    ejection = Ejection()
    ejection.fail(0.0, unreached=True)
    ejection.begin(1.0)
    assert not ejection.admits(1.1), "the trial has no result yet"
    assert ejection.admits(11.0), "it takes long: another one may try"
    assert ejection.fail(1.5)
    assert (ejection.admits(3.4), ejection.admits(3.5)) == (False, True)
    ejection.begin(3.5)
    assert ejection.succeed()
    assert (ejection.admits(3.6), ejection.troubled, ejection.count) == (True, False, 2)
