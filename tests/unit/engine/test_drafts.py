"""When drafts are made, by what they were worth."""

from __future__ import annotations

from palestra.engine.cuda.drafts import NOTED_STEPS, PAUSE, Speculation


def test_drafts_that_are_mostly_right_go_on() -> None:
    speculation = Speculation()
    for _ in range(100):
        assert speculation.is_worth_it()
        speculation.note(tokens=200, steps=100)


def test_drafts_that_are_mostly_wrong_pause_and_are_tried_again() -> None:
    speculation = Speculation()
    speculation.note(tokens=NOTED_STEPS + 1, steps=NOTED_STEPS)
    assert [speculation.is_worth_it() for _ in range(PAUSE)] == [False] * (PAUSE - 1) + [True]
    speculation.note(tokens=2 * NOTED_STEPS, steps=NOTED_STEPS)
    assert speculation.is_worth_it()


def test_a_few_steps_say_nothing_about_drafts() -> None:
    speculation = Speculation()
    speculation.note(tokens=4, steps=4)
    assert speculation.is_worth_it()
